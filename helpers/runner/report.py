"""What the terminal says after a run: the cell that failed, the claims, and the closing table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from helpers.runner import results
from helpers.runner.pages import ANSI

MOST_SOURCE = 40  # lines of a failing cell
MOST_ERROR = 15  # lines of its error


def failure(console: Console, outcome: results.Outcome) -> None:
    """Show the failing cell's source, the end of its error, and where the partial notebook is."""
    error = outcome.error
    if error is not None and outcome.judgement.result in {results.FAILED, results.TIMEOUT, results.STOPPED}:
        lines = error.source.splitlines()
        source = "\n".join(lines[:MOST_SOURCE])
        more = f"... {len(lines) - MOST_SOURCE} more lines" if len(lines) > MOST_SOURCE else ""
        body = Group(
            Syntax(source, "python", line_numbers=True, word_wrap=True, background_color="default"),
            Text(more, style="dim"),
            Text("\n".join(last_lines(error)), style="red"),
        )
        console.print(Panel(body, title=Text(f"{outcome.recipe}: {error.label}"), title_align="left", expand=False))
    judgement = outcome.judgement
    reason = judgement.reason.splitlines()[0] if judgement.reason else ""
    console.print(Text(f"{outcome.recipe}: {judgement.result}" + (f": {ANSI.sub('', reason)}" if reason else "")))
    console.print(Text(f"  partial notebook: {short(outcome.notebook)}"), soft_wrap=True)
    logs = [file for file in (outcome.folder / "logs").rglob("*") if file.is_file() and file.stat().st_size]
    if logs:
        console.print(Text(f"  logs: {short(outcome.folder / 'logs')}"), soft_wrap=True)


def last_lines(error: results.CellError) -> list[str]:
    """The end of the traceback as plain text; the full one is in the partial notebook."""
    text = ANSI.sub("", "\n".join(error.traceback)) or f"{error.name}: {error.message}"
    lines = [line for line in text.splitlines() if line.strip()]
    return [f"... {len(lines) - MOST_ERROR} lines before", *lines[-MOST_ERROR:]] if len(lines) > MOST_ERROR else lines


def closing_table(console: Console, outcomes: Sequence[results.Outcome]) -> None:
    """One row per run: what came out, how long it took, its headline metric, and its page."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head, justify in (("recipe", "left"), ("profile", "left"), ("result", "left"), ("seconds", "right")):
        table.add_column(head, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("headline metric", no_wrap=True)
    for outcome in outcomes:
        style = "green" if outcome.judgement.exit_code == 0 else "red"
        result = Text(outcome.judgement.result, style=style)
        table.add_row(outcome.recipe, outcome.profile, result, f"{outcome.seconds:.1f}", outcome.headline)
    console.print(table)
    for outcome in outcomes:
        if outcome.page:
            console.print(Text(f"  {short(outcome.page)}"), soft_wrap=True)


def short(path: Path) -> str:
    """The path as one would type it here: relative where it lies below this folder."""
    try:
        return str(path.relative_to(Path(os.getcwd()).resolve()))
    except ValueError:
        return str(path)
