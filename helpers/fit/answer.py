"""The answer to "will it fit?": what each strategy needs on each card, the largest micro-batch, advice, hours."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from helpers.fit import cards
from helpers.fit.strategies import Estimate
from helpers.fit.vocabulary import STRATEGIES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GIB = 2**30


@dataclass(frozen=True)
class Cost:
    """A lower bound on hours: floating-point operations over what the cards can do.

    flops_per_unit: operations per token or sample; formula: how they were counted.
    units: tokens or samples to train on; unit: its name. utilisation: assumed share of the cards' bf16 peak.
    price: per GPU-hour, in whatever currency the user means; None leaves money out.
    """

    flops_per_unit: float
    formula: str
    units: float
    unit: str
    utilisation: float = 0.4
    price: float | None = None

    def hours(self, card: cards.Card, gpus: int) -> float:
        return self.flops_per_unit * self.units / (card.tflops * 1e12 * self.utilisation * gpus) / 3600


@dataclass(frozen=True)
class Fit:
    """One job held against the cards. In a notebook it shows itself; `plot()` draws it, `summary()` says it in text.

    strategy: the one asked for. card: the one the job runs on, None when the hardware names no known card.
    estimates: strategy name -> Estimate. advice: what to use or change, cheapest first. notes: what the reader must
    know about the numbers.
    """

    title: str
    strategy: str
    micro_batch: int
    accumulation: int
    gpus: int
    card: cards.Card | None
    estimates: Mapping[str, Estimate]
    advice: Sequence[str]
    cost: Cost
    notes: Sequence[str] = field(default=())

    @property
    def fits(self) -> bool | None:
        """Whether the strategy asked for fits the card asked for; None without a card."""
        return self.estimates[self.strategy].fits(self.card) if self.card else None

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.gpus

    def rows(self) -> list[dict[str, Any]]:
        """One dict per strategy: its GiB per GPU and, per card, the largest micro-batch that fits (0: none does)."""
        return [
            {
                "strategy": STRATEGIES[name],
                "GiB per GPU": round(each.total() / GIB, 2),
                **{card.name: each.largest_micro_batch(card) for card in cards.CARDS.values()},
            }
            for name, each in self.estimates.items()
        ]

    def table(self) -> str:
        """The rows as text: the peak per GPU, then on each card whether it fits and the largest micro-batch."""
        header, body = self._cells()
        widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in (header, *body)]
        return "\n".join(line.rstrip() for line in lines)

    def summary(self) -> str:
        """Everything but the table, in short lines."""
        lines = [
            f"micro {self.micro_batch} x accumulation {self.accumulation} x world {self.gpus} "
            f"= global {self.global_batch}"
        ]
        each = self.estimates[self.strategy]
        parts = ", ".join(f"{k} {v / GIB:.2f}" for k, v in each.parts().items() if v >= 0.005 * GIB)
        lines.append(f"{STRATEGIES[self.strategy]} needs {each.total() / GIB:.2f} GiB per GPU: {parts} ({each.source})")
        lines += self.advice
        lines.append(self._cost_line())
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """A stacked bar per strategy against the cards' memory."""
        from helpers.fit import chart

        return chart.draw(self)

    def __str__(self) -> str:
        return f"{self.title}\n\n{self.table()}\n\n{self.summary()}"

    def _repr_html_(self) -> str:
        header, body = self._cells()
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        rows = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in row)}</tr>" for row in body)
        lines = "<br>".join(html.escape(line) for line in self.summary().splitlines())
        return (
            f"<p><strong>{html.escape(self.title)}</strong></p>"
            f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{lines}</p>"
        )

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        header = ["strategy", "GiB per GPU", *cards.CARDS]
        body = []
        for name, each in self.estimates.items():
            marks = [_mark(each, card) for card in cards.CARDS.values()]
            body.append([STRATEGIES[name], f"{each.total() / GIB:.2f}", *marks])
        return header, body

    def _cost_line(self) -> str:
        which = [self.card] if self.card else [cards.CARDS["H100"]]
        hours = self.cost.hours(which[0], self.gpus)
        line = (
            f"At least {_duration(hours)} on {self.gpus}x{which[0].name} for {_count(self.cost.units)} "
            f"{self.cost.unit} ({self.cost.formula}, {self.cost.utilisation:.0%} of {which[0].tflops:.0f} Tflop/s)"
        )
        if self.cost.price is not None:
            line += f"; {hours * self.gpus * self.cost.price:,.2f} at {self.cost.price:g} per GPU-hour"
        return line


def _mark(each: Estimate, card: cards.Card) -> str:
    word = "fits" if each.fits(card) else "tight" if each.total() <= card.bytes else "no"
    largest = each.largest_micro_batch(card)
    return f"{word}, up to micro-batch {_count(largest)}" if largest else word


def _count(value: float) -> str:
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{value:g}"


def _duration(hours: float) -> str:
    for unit, seconds in (("second", 1.0), ("minute", 60.0), ("hour", 3600.0)):
        count = hours * 3600 / seconds
        if count < 90 or unit == "hour":
            return f"{count:.2g} {unit}s" if count < 90 else f"{count:,.0f} {unit}s"
    raise AssertionError(hours)
