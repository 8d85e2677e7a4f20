"""Claims about the parameters of a notebook: read without running it, checked before anything starts."""

from __future__ import annotations

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from helpers.runner.errors import BadInput
from helpers.runner.parameters import (
    coerce,
    join_pairs,
    parse_command_line,
    read_file,
    read_parameters,
    split_pair,
)

CELL = """
profile: str = "smoke"  # which settings
learning_rate: float = 1e-3  # of the optimizer
steps: int | None = None  # None: the profile's own
mixed: bool = False  # bf16 where it can be
layers: list[int] = [64, 64]  # widths
# A comment above a line is its comment too.
name: str | None = None
"""


def known(source=CELL):
    return read_parameters(new_notebook(cells=[new_code_cell(source, metadata={"tags": ["parameters"]})]))


def test_names_types_defaults_and_comments_are_read():
    found = known()
    assert list(found) == ["profile", "learning_rate", "steps", "mixed", "layers", "name"]
    assert found["steps"].types == ("int", "None")
    assert found["layers"].default == [64, 64]
    assert found["learning_rate"].comment == "of the optimizer"
    assert found["name"].comment == "A comment above a line is its comment too."


def test_reading_parameters_runs_nothing(tmp_path):
    with pytest.raises(BadInput, match="derives 'x': only a plain literal"):
        known(f"x: str = open({str(tmp_path / 'ran')!r}, 'w').name")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import os", "line 1 of the parameters cell is not `name: type = literal`"),
        ("x: int = 1\nx: int = 2", "parameter 'x' is set twice"),
        ("x: torch.dtype = None", "has the type 'torch.dtype': use str, int"),
        ("x: int =", "is not Python: line 1"),
        ("a = b = 1", "is not `name: type = literal`"),
    ],
)
def test_a_cell_that_is_not_plain_literals_is_refused(source, message):
    with pytest.raises(BadInput, match=message):
        known(source)


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_cell_is_tagged_parameters(count):
    cells = [new_code_cell("x: int = 1", metadata={"tags": ["parameters"]}) for _ in range(count)]
    with pytest.raises(BadInput, match="tag exactly one"):
        read_parameters(new_notebook(cells=cells))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("learning_rate", "1e-3", 1e-3),  # YAML 1.1 takes this for text
        ("learning_rate", "1", 1.0),
        ("learning_rate", "010", 10.0),
        ("steps", "010", 10),  # YAML 1.1 takes this for eight
        ("steps", "20", 20),
        ("steps", "None", None),
        ("steps", "null", None),
        ("mixed", "true", True),
        ("layers", "[1, 2]", [1, 2]),
        ("name", "123", "123"),  # text stays text
        ("name", "a=b", "a=b"),
    ],
)
def test_values_on_the_command_line_take_the_type_of_the_parameter(name, text, value):
    (found,) = coerce(parse_command_line([(name, text)], known()), known()).values()
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", ".nan", "1e999"])
def test_a_number_that_is_not_finite_is_refused(text):
    with pytest.raises(BadInput, match=r"parameter learning_rate=.* is not finite"):
        coerce(parse_command_line([("learning_rate", text)], known()), known())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps", "1.5"),
        ("steps", "many"),
        ("steps", "true"),
        ("mixed", "1"),
        ("learning_rate", "fast"),
        ("layers", "3"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_the_right_types(name, text):
    with pytest.raises(BadInput, match=f"parameter {name}=.* is .*: it takes {known()[name].types[0]}"):
        coerce(parse_command_line([(name, text)], known()), known())


def test_an_unknown_parameter_names_the_nearest():
    with pytest.raises(BadInput, match=r"parameter 'learning_rte' is unknown\. Did you mean 'learning_rate'"):
        parse_command_line([("learning_rte", "1")], known())


def test_a_parameter_given_twice_is_refused():
    with pytest.raises(BadInput, match="'steps' is given twice"):
        parse_command_line([("steps", "1"), ("steps", "2")], known())


def test_a_file_holds_a_mapping_in_yaml(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("learning_rate: 1e-3\nsteps: 4\n")
    assert coerce(read_file(path), known()) == {"learning_rate": 1e-3, "steps": 4}
    path.write_text("- a\n")
    with pytest.raises(BadInput, match="must hold `name: value` lines, not list"):
        read_file(path)
    with pytest.raises(BadInput, match="cannot be read"):
        read_file(tmp_path / "none.yaml")


def test_name_and_value_may_be_two_words_or_one():
    assert join_pairs(["run", "-p", "steps", "4", "-p", "name=x"]) == ["run", "-p", "steps=4", "-p", "name=x"]
    assert split_pair("steps=4") == ("steps", "4")
    with pytest.raises(BadInput, match="write `-p NAME VALUE`"):
        split_pair("steps")
