"""A notebook's parameters, read from its `parameters` cell without running it, and the check of values."""

from __future__ import annotations

import ast
import contextlib
import io
import math
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml

from helpers.runner.errors import BadInput, unknown

SCALARS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "list": list, "dict": dict}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell: `learning_rate: float | None = None  # comment`."""

    name: str
    types: tuple[str, ...]  # names from SCALARS, and "None"
    default: Any
    comment: str
    annotated: bool

    def __str__(self) -> str:
        return f"{self.name}: {' | '.join(self.types)}"


def parameters_cell(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The one code cell tagged `parameters`; raises BadInput when there is none or more than one."""
    tagged = [
        cell for cell in notebook.cells if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", [])
    ]
    if len(tagged) != 1:
        found = f"{len(tagged)} cells are" if tagged else "no cell is"
        raise BadInput(f"{found} tagged `parameters`: tag exactly one, the cell that holds the parameters.")
    return tagged[0]


def read_parameters(notebook: nbformat.NotebookNode) -> dict[str, Parameter]:
    """Name -> Parameter, in the order of the cell; raises BadInput for a line that is not a plain literal."""
    source = parameters_cell(notebook).source
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise BadInput(f"the parameters cell is not Python: line {error.lineno}: {error.msg}.") from error
    comments = _comments(source)
    parameters: dict[str, Parameter] = {}
    for statement in tree.body:
        parameter = _parameter(statement, comments)
        if parameter.name in parameters:
            raise BadInput(f"parameter {parameter.name!r} is set twice in the parameters cell.")
        parameters[parameter.name] = parameter
    return parameters


def join_pairs(arguments: Sequence[str]) -> list[str]:
    """Turn `-p name value`, as papermill writes it, into `-p name=value`, one word for the parser."""
    joined: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        joined.append(word)
        if word in {"-p", "--parameter"} and waiting:
            name = waiting.pop(0)
            joined.append(f"{name}={waiting.pop(0)}" if name.isidentifier() and waiting else name)
    return joined


def split_pair(text: str) -> tuple[str, str]:
    """("name", "value") of a `-p` option; raises BadInput when there is no value."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise BadInput(f"-p {text!r} is not a parameter: write `-p NAME VALUE`.")
    return name.strip(), value


def parse_command_line(pairs: Sequence[tuple[str, str]], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Values of `-p name value`: text where the parameter is text, numbers as Python reads them, else YAML."""
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name not in parameters:
            raise unknown("parameter", name, parameters)
        if name in values:
            raise BadInput(f"parameter {name!r} is given twice.")
        values[name] = _parse(text, parameters[name])
    return values


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file of parameters."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"parameter file {path} cannot be read: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise BadInput(f"parameter file {path} must hold `name: value` lines, not {type(values).__name__}.")
    return values


def coerce(values: Mapping[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Check each value against its parameter's types; whole numbers become floats where a float is wanted."""
    checked = {}
    for name, value in values.items():
        if name not in parameters:
            raise unknown("parameter", name, parameters)
        parameter = parameters[name]
        kind = "None" if value is None else type(value).__name__
        if kind == "int" and "int" not in parameter.types and "float" in parameter.types:
            value, kind = float(value), "float"
        if kind == "str" and "float" in parameter.types and "str" not in parameter.types:
            value = _float_or_text(value)  # YAML 1.1 takes 1e-3, without a dot, for text
            kind = type(value).__name__
        if kind == "float" and not math.isfinite(value):
            raise BadInput(f"parameter {name}={value!r} is not finite: give a number.")
        if kind not in parameter.types:
            allowed = " or ".join(parameter.types)
            raise BadInput(f"parameter {name}={value!r} is {kind}: it takes {allowed}.")
        checked[name] = value
    return checked


def _parse(text: str, parameter: Parameter) -> Any:
    if "None" in parameter.types and text in {"None", "null"}:
        return None
    if set(parameter.types) <= {"str", "None"}:
        return text
    for kind in (int, float):  # before YAML, to which 010 is eight and 1e-3 a text
        if kind.__name__ in parameter.types:
            with contextlib.suppress(ValueError):
                return kind(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise BadInput(f"parameter {parameter.name}={text!r} cannot be read as YAML.") from error
    return text if "str" in parameter.types and type(value).__name__ not in parameter.types else value


def _float_or_text(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _parameter(statement: ast.stmt, comments: Mapping[int, str]) -> Parameter:
    comment = comments.get(statement.end_lineno or statement.lineno) or comments.get(statement.lineno, "")
    where = f"line {statement.lineno} of the parameters cell"
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
        name, annotated = statement.target.id, True
        types = _annotation(statement.annotation, name)
    elif (
        isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)
    ):
        name, annotated, types = statement.targets[0].id, False, ()
    else:
        raise BadInput(f"{where} is not `name: type = literal`: {ast.unparse(statement)!r}.")
    try:
        default = ast.literal_eval(statement.value)  # type: ignore[arg-type]
    except ValueError:
        raise BadInput(f"{where} derives {name!r}: only a plain literal may stand there.") from None
    kind = "None" if default is None else type(default).__name__
    return Parameter(name, types or (kind,), default, comment, annotated)


def _annotation(node: ast.expr, name: str) -> tuple[str, ...]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return (*_annotation(node.left, name), *_annotation(node.right, name))
    if isinstance(node, ast.Constant) and node.value is None:
        return ("None",)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        node = node.value  # list[int] is checked as list
    if isinstance(node, ast.Name) and node.id in SCALARS:
        return (node.id,)
    allowed = f"{', '.join(SCALARS)}, or these with | None"
    raise BadInput(f"parameter {name!r} has the type {ast.unparse(node)!r}: use {allowed}.")


def _comments(source: str) -> dict[int, str]:
    """Line number -> the comment at its end; a comment alone on a line belongs to the line below it."""
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            alone = not token.line[: token.start[1]].strip()
            line = token.start[0] + (1 if alone else 0)
            found[line] = text if alone or line not in found else f"{found[line]} {text}"
    return found
