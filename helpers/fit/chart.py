"""The picture of an answer: one stacked bar of bytes per strategy, held against the memory of the cards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.fit import cards
from helpers.fit.strategies import PARTS
from helpers.fit.vocabulary import STRATEGIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from helpers.fit.answer import Fit

GIB = 2**30
# Colours that differ in lightness too, and hatches where neighbours could be taken for each other in grey.
STYLE = {
    "weights": ("#0b3c5d", ""),
    "adapters": ("#d9822b", "...."),
    "gradients": ("#3b8ea5", "////"),
    "optimizer": ("#a8d0db", ""),
    "activations": ("#f2c57c", "\\\\\\\\"),
    "temporary": ("#fbe8c8", ""),
    "communication": ("#b04a5a", "xxxx"),
    "allowance": ("#9b9b9b", ""),
}


_FREE = "#efefef"


def draw(answer: Fit) -> Figure:
    """A Figure 9 inches wide; cards too large to matter for this job are left out, one larger than all bars stays."""
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    names = list(answer.estimates)
    bars = {name: answer.estimates[name].parts() for name in names}
    longest = max(sum(parts.values()) for parts in bars.values()) / GIB
    shown = _cards_for(answer, longest)
    limit = max(longest, shown[-1].memory) * 1.06
    figure = Figure(figsize=(9, 1.75 + 0.52 * len(names)), layout="constrained")
    axes = figure.subplots()
    outline = [withStroke(linewidth=3, foreground="white")]
    for row, name in enumerate(names):
        left = 0.0
        for part in PARTS:
            width = bars[name].get(part, 0) / GIB
            colour, hatch = STYLE[part]
            axes.barh(row, width, 0.62, left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6)
            left += width
        number = axes.text(left + limit * 0.006, row, f"{left:.1f}", va="center", fontsize=9, fontweight="bold")
        number.set_path_effects(outline)  # type: ignore[arg-type]
    _mark_cards(axes, shown, answer, len(names))
    axes.set_yticks(range(len(names)), [STRATEGIES[name] for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, limit)
    axes.set_xlabel("peak memory per GPU (GiB)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.suptitle(
        f"{answer.title}\nmicro-batch {answer.micro_batch}, {answer.gpus} GPUs",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _legend(figure, [part for part in PARTS if any(bars[n].get(part, 0) > 0.002 * longest * GIB for n in names)])
    return figure


def _cards_for(answer: Fit, longest: float) -> list[cards.Card]:
    ordered = sorted(cards.CARDS.values(), key=lambda card: card.memory)
    larger = [card for card in ordered if card.memory >= longest]
    limit = larger[0].memory * 1.02 if larger else ordered[-1].memory
    return [card for card in ordered if card.memory <= limit or card == answer.card]


def _mark_cards(axes: Axes, shown: list[cards.Card], answer: Fit, rows: int) -> None:
    from matplotlib.patheffects import withStroke

    groups: list[list[cards.Card]] = []
    for card in shown:  # A100-80 and H100 hold nearly the same: one line for both
        if groups and card.memory - groups[-1][-1].memory < 0.01 * shown[-1].memory:
            groups[-1].append(card)
        else:
            groups.append([card])
    for group in groups:
        mine = answer.card in group
        at, label = min(card.memory for card in group), "\n".join(card.name for card in group)
        axes.axvspan(cards.TIGHT * at, at, color=_FREE, zorder=0)
        line = axes.axvline(at, color="black", linewidth=1.6 if mine else 0.9, linestyle="-" if mine else (0, (4, 3)))
        line.set_path_effects([withStroke(linewidth=2.6, foreground="white")])
        axes.annotate(
            label,
            (at, 1),
            xytext=(0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
            fontweight="bold" if mine else "normal",
        )


def _legend(figure: Figure, parts: list[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=STYLE[p][0], hatch=STYLE[p][1], edgecolor="white", label=p) for p in parts]
    handles.append(Patch(facecolor=_FREE, label="kept free"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
