"""Pictures: what they show, that they look alike, and that they leave matplotlib as it was."""

import io
import struct
from itertools import pairwise
from typing import Any

import matplotlib
import numpy
import pytest

from helpers.plots import bars, confusion_matrix, learning_curve


def texts(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.findobj(matplotlib.text.Text) if text.get_text()]


EXAMPLES = {
    "learning_curve": lambda: learning_curve(
        {"train": [3.0, 2.0, 1.0], "held out": {1: 3.1, 3: 1.5}},
        x="epoch",
        y="cross-entropy (nats)",
        title="Learning",
        baseline=("logistic regression", 1.2),
    ),
    "bars": lambda: bars(
        {"before": 0.1, "after": 0.97}, y="held-out accuracy", title="Learned", baseline=("baseline", 0.95)
    ),
    "confusion_matrix": lambda: confusion_matrix([[5, 1], [0, 7]], ["cat", "dog"], title="Errors"),
}


@pytest.fixture(params=EXAMPLES)
def figure(request) -> Any:
    return EXAMPLES[request.param]()


def test_a_notebook_shows_it_sharp_at_its_size_and_with_an_alternative_text(figure):
    data, metadata = figure._repr_mimebundle_()
    width, height = struct.unpack(">II", data["image/png"][16:24])
    shown = metadata["image/png"]
    assert abs(width - 2 * shown["width"]) <= 2
    assert abs(height - 2 * shown["height"]) <= 2
    assert shown["width"] <= 620
    assert shown["alt"].startswith(f"{figure.axes[0].get_title(loc='left')}: ")
    assert len(data["image/png"]) < 200_000


def test_every_axis_says_what_it_shows(figure):
    axes = figure.axes[0]
    assert axes.get_xlabel()
    assert axes.get_ylabel() or [label.get_text() for label in axes.get_yticklabels()] == ["before", "after"]


def test_matplotlibs_own_settings_stay_as_they_were_and_pyplot_holds_no_figure():
    with matplotlib.rc_context({"font.size": 17, "axes.spines.top": True}):
        before = dict(matplotlib.rcParams)
        figures = [make() for make in EXAMPLES.values()]
        for figure in figures:
            figure._repr_mimebundle_()
        assert dict(matplotlib.rcParams) == before
    import matplotlib.pyplot as plt

    assert plt.get_fignums() == []


def test_nothing_is_drawn_outside_the_picture(figure):
    figure.savefig(io.BytesIO(), format="png")  # lays it out
    width, height = figure.canvas.get_width_height()
    box = figure.get_tightbbox()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 * figure.dpi <= width
    assert box.y1 * figure.dpi <= height


def test_curves_differ_without_colour_and_are_named_at_their_ends():
    figure = learning_curve({name: [3.0, 2.0, 1.0 + number / 100] for number, name in enumerate("abcdef")})
    drawn = figure.axes[0].lines[:6]
    assert len({str(line._dash_pattern) for line in drawn}) == 6
    assert len({line.get_marker() for line in drawn}) == 6
    labels = {text.get_text(): text.xy[1] for text in figure.axes[0].texts}
    assert labels.keys() == set("abcdef")
    heights = [labels[name] for name in "abcdef"]
    assert all(upper - lower > 0.07 for lower, upper in pairwise(heights))


def test_a_list_starts_at_one_and_a_mapping_keeps_its_positions():
    lines = learning_curve({"list": [3.0, 2.0], "mapping": {10: 1.0, 20: 0.5}}).axes[0].lines
    assert list(lines[0].get_xdata()) == [1, 2]
    assert list(lines[1].get_xdata()) == [10, 20]


def test_bars_show_each_value_and_the_baseline():
    shown = texts(EXAMPLES["bars"]())
    assert {"0.1", "0.97", "baseline 0.95"} <= set(shown)


def test_the_confusion_matrix_shows_counts_shades_shares_and_leaves_zeros_out():
    figure = confusion_matrix(numpy.array([[98, 2], [0, 0]]))
    assert [text.get_text() for text in figure.axes[0].texts] == ["98", "2"]
    assert figure.axes[0].images[0].get_array().tolist() == [[0.98, 0.02], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: learning_curve({}), "shows 1 to 6 curves and got 0"),
        (lambda: learning_curve({"train": []}), "curve 'train' has no points"),
        (lambda: bars({"a": float("nan")}, y="loss"), "bars needs finite values"),
        (lambda: confusion_matrix([[1, 2, 3], [4, 5, 6]]), r"got shape \(2, 3\)"),
        (lambda: confusion_matrix([[1, 0], [0, 1]], ["one"]), "1 labels for 2 classes"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
