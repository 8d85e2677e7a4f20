"""`gallery run`: everything is checked for every recipe first, then one after the other runs."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from helpers.fit import cards
from helpers.fit.vocabulary import UnknownCard
from helpers.runner import catalog, environments, execute, hardware, locks, parameters, report, results
from helpers.runner.errors import INTERRUPTED, NOTEBOOK_FAILED, OK, BadInput, BuildFailed, unknown


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    recipes: Sequence[str]
    profile: str | None = None
    parameters: Sequence[tuple[str, str]] = ()
    file: Path | None = None
    timeout: float | None = None  # minutes for each recipe
    kernel: str | None = None
    fail_fast: bool = False
    budget: float | None = None  # minutes for all of them
    since: str | None = None


def run(base: Path, request: Request, console: Console, say: Callable[[str], None]) -> int:
    """Run every recipe asked for and return the exit code: that of the first run that did not pass.

    Raises BadInput, with nothing started, if any of them could not run as asked. A recipe that the budget
    leaves no room for is named at the end; it is no failure.
    """
    begun = time.monotonic()
    recipes = catalog.select(base, list(request.recipes))
    if request.since:
        recipes = changed_first(base, recipes, request.since)
    waiting = [_job(base, recipe, request) for recipe in recipes]
    outcomes: list[results.Outcome] = []
    not_run: list[tuple[execute.Job, str]] = []
    while waiting:
        job = waiting.pop(0)
        expected = job.recipe.profiles[job.profile].minutes
        if request.budget is not None:
            left = request.budget - (time.monotonic() - begun) / 60
            if left < expected:
                why = f"it takes about {expected:g} min, and {max(left, 0):.1f} of {request.budget:g} are left"
                not_run.append((job, why))
                continue
            job = dataclasses.replace(job, minutes=min(job.minutes, left))
        outcome = _run_one(base, job, request, console, say)
        outcomes.append(outcome)
        code = outcome.judgement.exit_code
        if code >= INTERRUPTED or (request.fail_fast and code != OK):
            not_run += [(job, f"stopped after {outcome.recipe}") for job in waiting]
            break
    say("")
    report.closing_table(console, outcomes)
    for job, why in not_run:
        say(f"NOT RUN: {job.recipe.name}: {why}")
    return next((o.judgement.exit_code for o in outcomes if o.judgement.exit_code != OK), OK)


def changed_first(base: Path, recipes: list[catalog.Recipe], since: str) -> list[catalog.Recipe]:
    """The recipes whose notebook or lock differs from a git revision, then the others; each in its order."""
    names = hardware.ask(["git", "-C", str(base), "diff", "--name-only", since, "--"])
    if names is None:
        raise BadInput(f"--since {since!r} is not a git revision of {base}.")
    changed = {Path(name).stem for name in names.splitlines() if name.startswith("notebooks/")}
    return sorted(recipes, key=lambda recipe: not ({recipe.name, recipe.environment} & changed))


def lacking_gpus(wanted: str) -> str:
    """A line for a profile that is written for GPUs, on a machine that has none; "" otherwise."""
    try:
        cards.parse(wanted)
    except UnknownCard:  # "2 CPU processes"
        return ""
    if hardware.gpus():
        return ""
    return f"This profile is written for {wanted}; this machine has no GPU: every rank will be a CPU process, and slow."


def _run_one(
    base: Path, job: execute.Job, request: Request, console: Console, say: Callable[[str], None]
) -> results.Outcome:
    if request.kernel is None:
        begun = time.monotonic()
        try:
            environments.make(base, job.recipe.environment, say)
        except BuildFailed as error:  # other recipes have other environments: they still run
            say(str(error))
            judgement = results.Judgement(results.NO_ENVIRONMENT, NOTEBOOK_FAILED, str(error))
            folder = base / "runs" / job.recipe.name
            seconds = time.monotonic() - begun
            return results.Outcome(job.recipe.name, job.profile, judgement, seconds, folder, job.recipe.path)
    say(f"\n{job.recipe.name}: profile {job.profile}, time limit {job.minutes:.3g} min")
    if lack := lacking_gpus(job.recipe.profiles[job.profile].hardware):
        say(lack)
    outcome = execute.run(base, job)
    if outcome.judgement.exit_code != OK:
        report.failure(console, outcome)
    return outcome


def _job(base: Path, recipe: catalog.Recipe, request: Request) -> execute.Job:
    """The checked job of one recipe; nothing is built or started here."""
    try:
        known = parameters.read_parameters(recipe.load())
        values = {
            **(parameters.read_file(request.file) if request.file else {}),
            **parameters.parse_command_line(request.parameters, known),
        }
    except BadInput as error:
        raise BadInput(f"{recipe.name}: {error}") from None
    plan = execute.plan(recipe, request.profile, values, request.timeout)
    if request.kernel is None:
        locks.require_good_lock(base, recipe.environment)
        kernel, python = recipe.environment, environments.python_of(base, recipe.environment)
    else:
        kernel, python = request.kernel, _python_of_kernel(request.kernel)
    return execute.Job(recipe, kernel=kernel, python=python, **plan)


def _python_of_kernel(name: str) -> Path:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    manager = KernelSpecManager()
    try:
        found = manager.get_kernel_spec(name).argv[0]
    except NoSuchKernel:
        raise unknown("kernel", name, sorted(manager.find_kernel_specs())) from None
    # The kernel called python3 names no path: Jupyter puts its own interpreter there.
    return Path(found) if Path(found).is_absolute() else Path(sys.executable)
