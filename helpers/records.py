"""The numbers a notebook ends with and the claims about them: shown in its last cell, re-checked later.

`record` puts a table in the notebook and, beside it, a machine-readable bundle, so that an executed notebook
carries its own record. `evaluate` alone decides whether a claim holds, in the notebook and in the runner.
"""

from __future__ import annotations

import html
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

MIME = "application/vnd.ddp-gallery.record+json"

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne,
    ">": operator.gt, "<": operator.lt,
}  # fmt: skip

Value = float | int | str


class InvalidClaim(ValueError):
    """A claim that cannot be evaluated: not of the form `name operator number`, or its metric is missing."""


class ClaimFailed(AssertionError):
    """At least one recorded claim does not hold; the message gives each one's value and bound."""


@dataclass(frozen=True)
class Verdict:
    """One claim with what was measured: `value` and `bound` are the numbers on its left and right."""

    claim: str
    value: float
    bound: float
    holds: bool

    def __str__(self) -> str:
        return f"{self.claim} ({_show(self.value)} against {_show(self.bound)})"


def record(metrics: Mapping[str, Value], claims: Sequence[str]) -> list[Verdict]:
    """Show the metrics and the claims of this run in the notebook, and fail if a claim does not hold.

    metrics: name -> number or text; one-element arrays and tensors are unwrapped.
    claims: at least one, each `name operator number-or-name` with >=, <=, >, <, == or !=, for example
        "held_out_accuracy >= 0.95" or "held_out_accuracy > baseline_accuracy".
    Returns one verdict per claim. Raises InvalidClaim, before anything is shown, when a claim cannot be
    evaluated, and ClaimFailed, after the table is shown, when one does not hold. NaN satisfies no claim.
    """
    plain = {name: _plain(name, value) for name, value in metrics.items()}
    verdicts = evaluate(plain, claims)
    _display(plain, verdicts)
    failed = [verdict for verdict in verdicts if not verdict.holds]
    if failed:
        count = "1 claim does" if len(failed) == 1 else f"{len(failed)} claims do"
        raise ClaimFailed(f"{count} not hold: " + "; ".join(str(verdict) for verdict in failed))
    return verdicts


def evaluate(metrics: Mapping[str, Value], claims: Sequence[str]) -> list[Verdict]:
    """Decide each claim from the metrics; raises InvalidClaim for one that cannot be, or if there is none."""
    if isinstance(claims, str) or not claims:
        raise InvalidClaim(
            f"claims={claims!r}: give a list of at least one, for example ['held_out_accuracy >= 0.95']."
        )
    return [_verdict(metrics, claim) for claim in claims]


def bundle(metrics: Mapping[str, Value], verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The record as strict JSON: what the notebook stores under `MIME`. Non-finite numbers become text."""
    return {
        "schema": 1,
        "metrics": {name: _finite(value) for name, value in metrics.items()},
        "claims": [
            {**asdict(verdict), "value": _finite(verdict.value), "bound": _finite(verdict.bound)}
            for verdict in verdicts
        ],
    }


_CLAIM = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
_NON_FINITE = {"nan", "inf", "-inf"}


def _verdict(metrics: Mapping[str, Value], claim: str) -> Verdict:
    match = _CLAIM.fullmatch(claim) if isinstance(claim, str) else None
    if match is None:
        raise InvalidClaim(
            f"claim {claim!r} cannot be read: write `name operator number-or-name`, with one of "
            f"{', '.join(OPERATORS)}, for example 'held_out_accuracy >= 0.95'."
        )
    name, sign, right = match.groups()
    if right == name or right.lstrip("+-").lower() in ("inf", "infinity"):
        raise InvalidClaim(f"claim {claim!r} holds or fails whatever was measured: compare with a finite number.")
    value = _number(metrics, name, claim)
    try:
        bound = float(right)
    except ValueError:
        bound = _number(metrics, right, claim)
    # NaN != 1 is true in Python, and proves nothing.
    comparable = not (math.isnan(value) or math.isnan(bound))
    return Verdict(claim.strip(), value, bound, comparable and OPERATORS[sign](value, bound))


def _number(metrics: Mapping[str, Value], name: str, claim: str) -> float:
    if name not in metrics:
        near = get_close_matches(name, metrics, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InvalidClaim(
            f"claim {claim!r} is about {name!r}, which is not recorded.{hint} "
            f"Recorded: {', '.join(metrics) or 'nothing'}."
        )
    value = metrics[name]
    if isinstance(value, str) and value not in _NON_FINITE:
        raise InvalidClaim(f"claim {claim!r} compares {name}={value!r}, which is text: only numbers can be compared.")
    return float(value)


def _plain(name: str, value: Any) -> Value:
    """A Python number or text; a tensor or array of one element is unwrapped."""
    if isinstance(value, str | bool | int | float):
        return value
    try:
        value = value.item()
    except (AttributeError, RuntimeError, ValueError):  # torch and numpy refuse more than one element
        value = None
    if isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"metric {name!r} is neither a number nor text: give a float, an int or a str.")


def _finite(value: Value) -> Value:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _show(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _display(metrics: Mapping[str, Value], verdicts: Sequence[Verdict]) -> None:
    rows = [(name, _show(value)) for name, value in metrics.items()]
    width = max((len(name) for name, _ in rows), default=0)
    lines = [f"{name.ljust(width)}  {value}" for name, value in rows]
    lines += [f"[{'holds' if verdict.holds else 'FAILS'}] {verdict}" for verdict in verdicts]
    text = "\n".join(lines)
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:  # a plain script: the table as text is all there is to show
        print(text)
        return
    if get_ipython() is None:
        print(text)
        return
    data = {"text/plain": text, "text/html": _html(rows, verdicts), MIME: bundle(metrics, verdicts)}
    display(data, raw=True)


def _html(rows: Sequence[tuple[str, str]], verdicts: Sequence[Verdict]) -> str:
    left = 'style="text-align:left"'

    def cells(*values: str) -> str:
        return "<tr>" + "".join(f"<td {left}>{html.escape(value)}</td>" for value in values) + "</tr>"

    def table(caption: str, heads: Sequence[str], body: str) -> str:
        head = "".join(f"<th {left}>{name}</th>" for name in heads)
        return f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    metrics = table("Recorded", ("metric", "value"), "".join(cells(name, value) for name, value in rows))
    claims = "".join(
        cells(v.claim, _show(v.value), _show(v.bound), "holds" if v.holds else "does not hold") for v in verdicts
    )
    return metrics + table("Claims", ("claim", "value", "bound", "verdict"), claims)
