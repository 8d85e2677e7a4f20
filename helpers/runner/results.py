"""What a run came to: its record is read from the executed notebook and judged here once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from helpers.records import MIME, InvalidClaim, Verdict, evaluate
from helpers.runner.errors import CLAIM_FAILED, NOTEBOOK_FAILED, OK

PASSED, FAILED, CLAIM, TIMEOUT, STOPPED = "passed", "failed", "claim failed", "time limit", "interrupted"
NO_ENVIRONMENT = "no environment"


@dataclass(frozen=True)
class CellError:
    """The cell that ended a notebook: its index, source and what it raised."""

    index: int
    label: str
    source: str
    name: str
    message: str
    traceback: tuple[str, ...]


@dataclass
class Judgement:
    """Result in a word, exit code, the reason where it is not a pass, and what was recorded."""

    result: str
    exit_code: int
    reason: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass
class Outcome:
    """One finished run, as the closing table shows it."""

    recipe: str
    profile: str
    judgement: Judgement
    seconds: float
    folder: Path
    notebook: Path
    page: Path | None = None
    error: CellError | None = None

    @property
    def headline(self) -> str:
        """The metric that the recipe's first claim is about."""
        if not self.judgement.verdicts:
            return ""
        first = self.judgement.verdicts[0]
        return f"{first.claim.split()[0]} {first.value:.4g}"


def read_records(notebook: nbformat.NotebookNode) -> list[Mapping[str, Any]]:
    """Every record bundle in the outputs of a notebook: a later one does not take back an earlier one's claims."""
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return [data[MIME] for output in outputs if MIME in (data := output.get("data", {}))]


def judge(notebook: nbformat.NotebookNode, error: CellError | None) -> Judgement:
    """Decide the result from the executed notebook itself, not from what it says about itself.

    A cell that raised is a failure, unless the record shows a claim that does not hold: then that is the
    reason. A notebook that ran to its end without a record has proven nothing: a failed claim.
    """
    records = read_records(notebook)
    if not records:
        if error:
            return Judgement(FAILED, NOTEBOOK_FAILED, f"{error.name}: {error.message}")
        return Judgement(CLAIM, CLAIM_FAILED, "the notebook recorded nothing: its last cell must call record(...)")
    try:
        verdicts = [
            verdict
            for record in records
            for verdict in evaluate(record["metrics"], [claim["claim"] for claim in record["claims"]])
        ]
        metrics = records[-1]["metrics"]
    except (InvalidClaim, KeyError, TypeError) as fault:
        return Judgement(CLAIM, CLAIM_FAILED, f"the record cannot be judged: {fault}")
    failed = [str(verdict) for verdict in verdicts if not verdict.holds]
    if failed:
        return Judgement(CLAIM, CLAIM_FAILED, "does not hold: " + "; ".join(failed), metrics, verdicts)
    if error:
        return Judgement(FAILED, NOTEBOOK_FAILED, f"{error.name}: {error.message}", metrics, verdicts)
    return Judgement(PASSED, OK, "", metrics, verdicts)
