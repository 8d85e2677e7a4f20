"""Run one recipe: a folder of its own, papermill, and what stays behind for the reader and for CI."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import nbformat

from helpers import records
from helpers.runner import hardware, live, pages, parameters, results
from helpers.runner.catalog import Recipe
from helpers.runner.errors import INTERRUPTED, NOTEBOOK_FAILED, BadInput, BuildFailed, unknown
from helpers.runner.processes import Terminated


@dataclass(frozen=True)
class Job:
    """A recipe with everything that was asked of it, checked: it can start."""

    recipe: Recipe
    profile: str
    values: Mapping[str, Any]  # the parameters to inject, profile among them
    minutes: float  # time limit
    kernel: str  # name of a registered Jupyter kernel
    python: Path  # the interpreter behind it, for the list of versions


def plan(recipe: Recipe, profile: str | None, values: Mapping[str, Any], limit: float | None) -> dict[str, Any]:
    """Check a profile and parameter values against a notebook; raises BadInput before anything starts.

    Returns the values to inject and the time limit in minutes: `limit`, or ten times what the profile is
    expected to take, but at least 15.
    """
    try:
        known = parameters.read_parameters(recipe.load())
        checked = parameters.coerce(values, known)
    except BadInput as error:
        raise BadInput(f"{recipe.name}: {error}") from None
    if next(iter(known), None) != "profile":
        raise BadInput(f"{recipe.name}: the first parameter must be `profile`.")
    if profile is not None and checked.setdefault("profile", profile) != profile:
        raise BadInput(f"--profile {profile} and parameter profile={checked['profile']!r} differ: give one.")
    chosen = checked.setdefault("profile", known["profile"].default)
    if chosen not in recipe.profiles:
        raise unknown(f"profile of {recipe.name}", str(chosen), recipe.profiles)
    if limit is not None and not 0 < limit < math.inf:
        raise BadInput(f"--timeout {limit} is not a time limit: give minutes, more than 0.")
    minutes = max(15.0, 10 * recipe.profiles[chosen].minutes) if limit is None else limit
    return {"profile": chosen, "values": checked, "minutes": minutes}


def run(base: Path, job: Job) -> results.Outcome:
    """Execute a job and return what it came to; whatever happens, no process of it is left.

    An interrupt does not raise: the outcome says so, and its exit code is 130 (143 after SIGTERM).
    """
    import papermill

    from helpers.runner import engine

    folder = new_folder(base / "runs" / job.recipe.name)
    notebook_path = folder / job.recipe.path.name
    notebook = papermill.iorw.load_notebook_node(str(job.recipe.path))
    prepared = papermill.parameterize.parameterize_notebook(notebook, dict(job.values), language="python")
    shown = live.Live(prepared)
    limit = engine.TimeLimit(job.minutes, folder)
    begun, wall = datetime.now().astimezone(), time.monotonic()
    stopped = 0
    problem: Exception | None = None
    try:
        papermill.execute_notebook(
            prepared, str(notebook_path), engine_name=engine.NAME, kernel_name=job.kernel, language="python",
            progress_bar=False, cwd=str(job.recipe.path.parent), live=shown, limit=limit,
        )  # fmt: skip
    except KeyboardInterrupt as signalled:
        stopped = 128 + signal.SIGTERM if isinstance(signalled, Terminated) else INTERRUPTED
    except Exception as error:  # a failed cell, a dead kernel, a kernel that never started
        problem = error
    seconds = time.monotonic() - wall
    executed = nbformat.read(notebook_path, as_version=4) if notebook_path.exists() else prepared
    failure = _cell_error(executed, problem, shown)
    judgement = results.judge(executed, failure)
    if limit.reached:
        reason = f"not finished after {job.minutes:g} minutes; every process of it was ended"
        judgement = results.Judgement(results.TIMEOUT, NOTEBOOK_FAILED, reason, judgement.metrics)
    elif stopped:
        judgement = results.Judgement(results.STOPPED, stopped, "interrupted; every process of it was ended")
    outcome = results.Outcome(job.recipe.name, job.profile, judgement, seconds, folder, notebook_path, error=failure)
    _leave_behind(base, job, outcome, executed, shown, begun)
    return outcome


def new_folder(parent: Path) -> Path:
    """A new folder named by the time; two runs in the same second get two folders."""
    parent.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1, 1000):
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        (folder / "logs").mkdir()
        return folder.resolve()
    raise BadInput(f"{parent} has a thousand runs of the second {stamp}.")


def _cell_error(
    notebook: nbformat.NotebookNode, problem: Exception | None, shown: live.Live
) -> results.CellError | None:
    """The error output of the cell that failed, or what ended the kernel while a cell ran."""
    labels = live.cell_labels(notebook)
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return results.CellError(
                    index,
                    labels.get(index, ""),
                    cell.source,
                    output.ename,
                    output.evalue,
                    tuple(output.traceback),
                )
    if problem is None:
        return None
    index = shown.current if shown.current is not None else 0
    return results.CellError(
        index, shown.labels.get(index, "before the first cell"), notebook.cells[index].source,
        type(problem).__name__, str(problem), (),
    )  # fmt: skip


def _leave_behind(
    base: Path,
    job: Job,
    outcome: results.Outcome,
    executed: nbformat.NotebookNode,
    shown: live.Live,
    begun: datetime,
) -> None:
    """Write page, record and frozen environment, and point `latest` here."""
    folder, judgement = outcome.folder, outcome.judgement
    try:
        from helpers.runner.environments import freeze

        versions = freeze(job.python)
    except (BuildFailed, OSError) as error:
        versions = f"# {error}\n"
    (folder / "environment.txt").write_text(versions)
    record = {
        "schema": 1,
        "recipe": job.recipe.name,
        "title": job.recipe.title,
        "profile": job.profile,
        "parameters": dict(job.values),
        "result": judgement.result,
        "exit_code": judgement.exit_code,
        "reason": judgement.reason,
        "metrics": dict(judgement.metrics),
        "claims": records.bundle({}, judgement.verdicts)["claims"],
        "started": begun.isoformat(timespec="seconds"),
        "seconds": round(outcome.seconds, 2),
        "cells": [
            {"cell": shown.labels[index], "seconds": round(seconds, 2)} for index, seconds in shown.seconds.items()
        ],
        "environment": job.recipe.environment,
        "kernel": job.kernel,
        "hardware": hardware.describe(),
        "versions": dict(line.split("==", 1) for line in versions.splitlines() if "==" in line),
        "runner": {"python": platform.python_version(), "executable": sys.executable},
        "git": hardware.git_state(base),
    }
    (folder / "record.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
    outcome.page = pages.write(executed, record, folder / f"{job.recipe.name}.html")
    point_latest(folder)


def point_latest(folder: Path) -> None:
    """Make `latest` beside a run's folder a link to it, in one step."""
    part = folder.parent / f".latest.{os.getpid()}.{folder.name}"
    part.symlink_to(folder.name)
    part.replace(folder.parent / "latest")
