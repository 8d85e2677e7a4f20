"""What the source of a notebook's cells says: its code, its text, its links, its calls. Nothing is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from nbformat import NotebookNode as Notebook


def code_cells(notebook: Notebook) -> list[tuple[int, Notebook]]:
    return [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"]


def text_cells(notebook: Notebook) -> list[tuple[int, Notebook]]:
    return [(number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "markdown"]


def without_fences(source: str) -> str:
    """Text without its code blocks, in which # means another thing."""
    return re.sub(r"^```.*?^```", "", source, flags=re.DOTALL | re.MULTILINE)


def link_targets(source: str) -> list[str]:
    """The targets of links and pictures, those in code left out."""
    prose = re.sub(r"`[^`\n]+`", "`code`", without_fences(source))
    return re.findall(r"\]\(<?([^)\s>]+)>?[^)]*\)", prose) + re.findall(r"<img[^>]+src=\"([^\"]+)\"", prose)


def calls(notebook: Notebook, function: str) -> Iterator[tuple[int, ast.Call]]:
    """Each call of `function`, plain or as an attribute of a module, with the number of its cell."""
    for number, tree in trees(notebook):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and function in {
                getattr(node.func, "id", None),
                getattr(node.func, "attr", None),
            }:
                yield number, node


def trees(notebook: Notebook) -> Iterator[tuple[int, ast.Module]]:
    for number, cell in code_cells(notebook):
        with suppress(SyntaxError):  # a fault that the rule about names reports
            yield number, ast.parse(plain_python(cell))


def plain_python(cell: Notebook) -> str:
    """A cell's source with its magics turned into Python, line for line; nothing for a cell in another language."""
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager().transform_cell(cell.source) if not cell.source.startswith("%%") else ""


def names_of(base: Path, module: str) -> set[str]:
    """Names that a module of this repository binds at its top level, its submodules among them."""
    folder = base.joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not file.is_file():
        return set()
    tree = ast.parse(file.read_text())
    found = {path.stem for path in folder.iterdir()} if folder.is_dir() else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return found
