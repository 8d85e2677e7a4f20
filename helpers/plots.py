"""The few pictures that all recipes share: learning curve, bars against a baseline, confusion matrix."""

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[float] | Mapping[float, float]

# Safe for colour-blind eyes (after Okabe and Ito) and of unlike greys; dashes and markers do without any colour
_COLOURS = ("#00558B", "#E07B00", "#009E73", "#B0578D", "#444444", "#56B4E9")
_DASHES = ("-", (0, (4, 2)), (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5)), (0, (2, 1)), (0, (9, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_INK = "#222222"
_LINE = 0.078  # a line of text, as a share of the height of a learning curve
_STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "figure.facecolor": "white",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.labelcolor": _INK,
    "axes.axisbelow": True,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
}


def learning_curve(
    curves: Mapping[str, Curve],
    *,
    x: str = "optimizer step",
    y: str = "loss",
    title: str = "",
    baseline: tuple[str, float] | None = None,
    log: bool = False,
) -> "Figure":
    """Lines over steps or epochs, each named at its end.

    curves: name -> the values at 1, 2, 3 ..., or {position: value} where the positions are others.
    x, y: the axes' labels, with units, such as "epoch" and "cross-entropy (nats)". baseline: name and value of a
    horizontal line. log: logarithmic y axis.
    Raises ValueError for no curves, an empty one, or more than can be told apart (6).
    """
    if not curves or len(curves) > len(_COLOURS):
        raise ValueError(f"learning_curve shows 1 to {len(_COLOURS)} curves and got {len(curves)}.")
    points = {
        name: dict(values) if isinstance(values, Mapping) else dict(enumerate(values, start=1))
        for name, values in curves.items()
    }
    if empty := [name for name, values in points.items() if not values]:
        raise ValueError(f"curve {empty[0]!r} has no points.")
    last = {name: list(values.values())[-1] for name, values in points.items()}
    with _figure((5.4, 3.0), _alt(title, f"{y} over {x}, last values", last, baseline)) as (figure, axes):
        lines = []
        for (name, values), colour, dash, marker in zip(points.items(), _COLOURS, _DASHES, _MARKERS, strict=False):
            look = {"color": colour, "linestyle": dash, "linewidth": 1.6}
            few = marker if len(values) <= 20 else None
            axes.plot(list(values), list(values.values()), marker=few, markersize=4, **look)
            lines.append((last[name], name, look))
        if baseline is not None:
            look = {"color": _INK, "linewidth": 0.9, "linestyle": (0, (1, 2.5))}
            axes.axhline(baseline[1], **look)
            lines.append((baseline[1], baseline[0], look))
        _scale(axes, log, whole=all(float(place).is_integer() for values in points.values() for place in values))
        axes.grid(axis="y")
        axes.margins(x=0.02)
        axes.set(xlabel=x, ylabel=y, title=title)
        _name_ends(axes, lines)
    return figure


def bars(
    values: Mapping[str, float],
    *,
    y: str,
    title: str = "",
    baseline: tuple[str, float] | None = None,
    limits: tuple[float, float] | None = None,
    form: str = "{:.3g}",
) -> "Figure":
    """Horizontal bars, one a name, each with its value; a dashed line marks what they are measured against.

    y: what the length means, with its unit, such as "held-out accuracy" or "peak memory (GiB)".
    baseline: name and value of the line. limits: the axis' range; from 0 when not given. form: of the values.
    Raises ValueError for no values or one that is not finite.
    """
    if not values or not all(math.isfinite(value) for value in values.values()):
        raise ValueError(f"bars needs finite values and got {dict(values)}.")
    height = 0.8 + 0.36 * len(values) + (0.2 if baseline else 0)
    with _figure((5.4, height), _alt(title, y, values, baseline)) as (figure, axes):
        drawn = axes.barh(list(values), list(values.values()), color=_COLOURS[0], height=0.62)
        halo = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}  # keeps the number readable on the line
        numbers = [form.format(value) for value in values.values()]
        axes.bar_label(drawn, numbers, padding=4, color=_INK, bbox=halo, zorder=4)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        if limits is not None:
            axes.set_xlim(*limits)
        if baseline is not None:
            name, level = baseline
            axes.axvline(level, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)))
            axes.axvline(level, color="white", linewidth=2.6, zorder=1.5, alpha=0.9)  # seen on the bars in grey too
            where = {"xy": (level, 1), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
            axes.annotate(f"{name} {form.format(level)}", xytext=(0, 2), ha="center", va="bottom", color=_INK, **where)
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(y)
        axes.set_title(title, pad=18 if baseline else 6)
    return figure


def confusion_matrix(counts: Any, labels: Sequence[Any] | None = None, *, title: str = "") -> "Figure":
    """True classes down, predicted ones across; the shade is the share of the true class, the number the count.

    counts: square array (classes, classes) of whole numbers, rows being the true class. labels: the classes' names.
    Up to 20 classes show their counts, zeros left out so that the eye finds the errors.
    Raises ValueError when it is not square or has negative numbers, or when the labels do not match.
    """
    import numpy

    table = numpy.asarray(counts)
    if table.ndim != 2 or table.shape[0] != table.shape[1] or table.size == 0 or (table < 0).any():
        raise ValueError(f"confusion_matrix needs a square array of counts and got shape {table.shape}.")
    names = [str(label) for label in (range(len(table)) if labels is None else labels)]
    if len(names) != len(table):
        raise ValueError(f"{len(names)} labels for {len(table)} classes.")
    share = table / numpy.maximum(table.sum(axis=1, keepdims=True), 1)
    side = max(2.8, min(6.0, 1.1 + 0.31 * len(table)))
    right = {"samples": int(table.sum()), "on the diagonal": int(table.trace())}
    with _figure((side + 0.8, side), _alt(title, "true class by predicted class", right, None)) as (figure, axes):
        image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
        if len(table) <= 20:
            for row, column in zip(*table.nonzero(), strict=True):
                tint = "white" if share[row, column] > 0.55 else _INK
                axes.text(column, row, str(table[row, column]), ha="center", va="center", color=tint, fontsize=8)
        turned = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if max(map(len, names)) > 3 else {}
        axes.set_xticks(range(len(names)), names, **turned)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(length=0)
        axes.set(xlabel="predicted class", ylabel="true class", title=title)
        for spine in axes.spines.values():
            spine.set_visible(True)
        bar = figure.colorbar(image, ax=axes, shrink=0.8, aspect=18, ticks=[0, 0.5, 1], format="{x:.0%}")
        bar.set_label("share of true class")
        bar.outline.set_visible(False)
    return figure


@contextlib.contextmanager
def _figure(size: tuple[float, float], alt: str) -> Iterator[tuple[Any, Any]]:
    """A figure in the common style that pyplot does not know: a cell's result shows it once, and it is freed."""
    import matplotlib
    from matplotlib.figure import Figure

    class Picture(Figure):
        """Shown by a notebook at twice the pixels and with an alternative text, whatever the backend."""

        def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, bytes], dict[str, dict[str, Any]]]:
            data = io.BytesIO()
            self.savefig(data, format="png", dpi=2 * self.dpi)
            width, height = (int(inches * self.dpi) for inches in self.get_size_inches())
            return {"image/png": data.getvalue()}, {"image/png": {"width": width, "height": height, "alt": alt}}

    with matplotlib.rc_context(_STYLE):
        figure = Picture(figsize=size)
        yield figure, figure.add_subplot()


def _alt(title: str, what: str, values: Mapping[str, float], baseline: tuple[str, float] | None) -> str:
    listed = [*values.items(), *([baseline] if baseline else [])]
    return f"{title or 'Chart'}: {what}: " + ", ".join(f"{name} {value:.4g}" for name, value in listed) + "."


def _scale(axes: Any, log: bool, whole: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=whole))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _name_ends(axes: Any, lines: list[tuple[float, str, dict[str, Any]]]) -> None:
    """Write each line's name, with a piece of the line, beside its last value; moved apart where they overlap."""
    low, high = axes.get_ylim()
    bend = math.log if axes.get_yscale() == "log" else float
    axes.set_ylim(low, high)
    lines = sorted(lines, key=lambda line: line[0])
    heights = [(bend(value) - bend(low)) / (bend(high) - bend(low)) for value, _, _ in lines]
    for _ in range(300):
        for lower in range(len(heights) - 1):
            if (lacking := _LINE - (heights[lower + 1] - heights[lower])) > 0:
                heights[lower] -= lacking / 2
                heights[lower + 1] += lacking / 2
    for height, (_, name, look) in zip(heights, lines, strict=True):
        axes.plot([1.015, 1.06], [height] * 2, transform=axes.transAxes, clip_on=False, **look)
        axes.annotate(name, (1.075, height), xycoords="axes fraction", color=_INK, va="center")
