"""Static checks of the notebooks: what readers and the runner rely on, without running a cell."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import nbformat

from helpers.runner import catalog, cells, locks, parameters
from helpers.runner.errors import BadInput

# Level-2 headings of every recipe, in this order; the level-1 heading above them is the title.
HEADINGS = (
    "Setup",
    "Parameters",
    "Settings",
    "Will it fit?",
    "Data",
    "Train",
    "Results",
    "Proof",
    "Register and reload",
    "Make it yours",
)
OUR_PACKAGES = ("helpers", "data_prep")
MOST_CODE = 300  # lines of code, comments and blank lines not counted
KNOWN_NAMES = {
    "display",
    "get_ipython",
    "dbutils",
    "spark",
    "__file__",
}  # put there by Jupyter and Databricks


@dataclass(frozen=True)
class Fault:
    """One thing to mend: the rule it breaks, the cell (from 1; None: the whole file), and a sentence."""

    path: Path
    rule: str
    cell: int | None
    text: str

    def __str__(self) -> str:
        where = f"{self.path.name}" + (f", cell {self.cell}" if self.cell else "")
        return f"{where}: {self.text} [{self.rule}]"


Notebook = nbformat.NotebookNode
Finding = tuple[int | None, str]
Rule = Callable[[Path, Path, Notebook], Iterator[Finding]]


def check(base: Path, path: Path) -> list[Fault]:
    """Every fault of one notebook; raises BadInput when it cannot be read at all."""
    notebook = catalog.read_notebook(path)
    return [Fault(path, name, cell, text) for name, rule in RULES.items() for cell, text in rule(base, path, notebook)]


def metadata(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """The gallery metadata is complete, and the kernel is that of the recipe's environment."""
    for fault in catalog.faults_of_metadata(notebook):
        yield None, fault
    environment = _environment(notebook)
    kernel = notebook.metadata.get("kernelspec", {}).get("name")
    if environment and kernel != environment:
        yield None, f"its kernel is {kernel!r}, its environment {environment!r}: they must have the same name"


def no_outputs(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """Committed notebooks carry no outputs, execution counts or traces of a run."""
    for number, cell in cells.code_cells(notebook):
        if cell.get("outputs"):
            yield number, "has outputs: clear them before committing"
        if cell.get("execution_count") is not None:
            yield number, f"has execution count {cell.execution_count}: clear it before committing"
        if "injected-parameters" in cell.metadata.get("tags", []):
            yield number, "was injected by a run: this is an executed notebook"


def headings(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """One title, then the sections that every recipe has, in their order."""
    found = [
        (number, len(match[1]), match[2].strip())
        for number, cell in cells.text_cells(notebook)
        for match in re.finditer(r"^(#{1,2}) +(.+)$", cells.without_fences(cell.source), re.MULTILINE)
    ]
    titles = [number for number, level, _ in found if level == 1]
    if titles[:1] != [1] or len(titles) > 1:
        yield None, f"needs one title (`# ...`), in its first cell; found {len(titles)}"
    sections = [text for _, level, text in found if level == 2]
    for missing in [text for text in HEADINGS if text not in sections]:
        yield None, f"section `## {missing}` is missing"
    for number, level, text in found:
        if level == 2 and text not in HEADINGS:
            yield number, f"section `## {text}` is not one of {', '.join(HEADINGS)}: use ### inside a section"
    known = [text for text in sections if text in HEADINGS]
    for text in sorted(set(known), key=known.index):
        if known.count(text) > 1:
            yield None, f"section `## {text}` stands {known.count(text)} times"
    if sorted(known, key=HEADINGS.index) != known:
        yield None, f"sections are out of order: {', '.join(known)}"


def parameters_cell(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """The parameters are annotated literals with a comment each; `profile` is first and names a known one."""
    try:
        number = 1 + notebook.cells.index(parameters.parameters_cell(notebook))
        known = parameters.read_parameters(notebook)
    except BadInput as error:
        yield None, str(error)
        return
    if next(iter(known), None) != "profile":
        yield number, "the first parameter must be `profile`"
    for parameter in known.values():
        if not parameter.annotated:
            yield number, f"parameter {parameter.name!r} has no type: write `{parameter.name}: type = ...`"
        if not parameter.comment:
            yield number, f"parameter {parameter.name!r} has no comment saying what it means"
        try:
            parameters.coerce({parameter.name: parameter.default}, known)
        except BadInput as error:
            yield number, str(error)
    profiles = (notebook.metadata.get("gallery") or {}).get("profiles") or {}
    if "profile" in known and profiles and known["profile"].default not in profiles:
        yield number, f"profile={known['profile'].default!r} is not one of {', '.join(profiles)}"


def names(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """Every name that a cell uses is bound by it or by a cell above."""
    from pyflakes.checker import Checker
    from pyflakes.messages import UndefinedLocal, UndefinedName

    lines: list[tuple[int, str]] = []  # (cell number, line of plain Python)
    for number, cell in cells.code_cells(notebook):
        plain = cells.plain_python(cell)
        try:
            ast.parse(plain)
        except SyntaxError as error:
            yield number, f"is not valid Python: line {error.lineno}: {error.msg}"
            return
        lines += [(number, line) for line in plain.splitlines()]
    tree = ast.parse("\n".join(line for _, line in lines) + "\n")
    for message in Checker(tree, filename=path.name, builtins=KNOWN_NAMES).messages:
        if isinstance(message, UndefinedName | UndefinedLocal):
            yield (
                lines[message.lineno - 1][0],
                f"uses {message.message_args[0]!r}, which nothing above defines",
            )


def imports(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """What a notebook imports from this repository is there: modules as files, names bound in them."""
    for number, tree in cells.trees(notebook):
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                asked = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                asked = [(alias.name.rpartition(".")[0], alias.name.rpartition(".")[2]) for alias in node.names]
            else:
                continue
            for module, name in asked:
                if module.split(".")[0] in OUR_PACKAGES and name not in cells.names_of(base, module):
                    yield number, f"imports {name!r} from {module}, which has no such name"


def lock(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """The environment has a lock that agrees with pyproject.toml, and the Setup cell names it."""
    environment = _environment(notebook)
    if not environment:
        return  # the metadata rule has said so
    try:
        fault = locks.fault(base, environment)
    except BadInput as error:
        fault = str(error)
    if fault:
        yield None, fault
    asked = [(number, call.args) for number, call in cells.calls(notebook, "setup")]
    if not asked:
        yield None, f"no cell calls helpers.setup({environment!r})"
    for number, arguments in asked:
        value = arguments[0].value if arguments and isinstance(arguments[0], ast.Constant) else None
        if value != environment:
            yield number, f"setup asks for {value!r}, but the metadata says {environment!r}"


def links(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """Relative links and pictures lead to files; links to a section lead to one of this notebook."""
    anchors = {
        match[1].strip().replace(" ", "-")
        for _, cell in cells.text_cells(notebook)
        for match in re.finditer(r"^#+ +(.+)$", cell.source, re.MULTILINE)
    }
    for number, cell in cells.text_cells(notebook):
        for target in cells.link_targets(cell.source):
            file, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z][a-z0-9+.-]*:", target) or (not file and anchor in anchors):
                continue
            if not file:
                yield number, f"link #{anchor} leads to no heading of this notebook"
            elif file.startswith("/") or not (path.parent / file).exists():
                yield number, f"link {file} leads nowhere"


def length(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """A notebook is short enough to be read."""
    count = sum(
        bool(line.strip()) and not line.lstrip().startswith("#")
        for _, cell in cells.code_cells(notebook)
        for line in cell.source.splitlines()
    )
    if count > MOST_CODE:
        yield None, f"has {count} lines of code: at most {MOST_CODE}"


def profiles(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """The profiles of the metadata are those that the settings cell offers."""
    told = set((notebook.metadata.get("gallery") or {}).get("profiles") or {})
    for number, call in cells.calls(notebook, "choose"):
        offered = {keyword.arg for keyword in call.keywords if keyword.arg}
        if offered and offered != told:
            missing, extra = ", ".join(sorted(offered - told)), ", ".join(sorted(told - offered))
            yield number, f"profiles differ from the metadata's: only here {missing or '-'}, only there {extra or '-'}"


def record(base: Path, path: Path, notebook: Notebook) -> Iterator[Finding]:
    """The last code cell records the numbers."""
    code = [number for number, cell in cells.code_cells(notebook) if cell.source.strip()]
    if not code or code[-1] not in [number for number, _ in cells.calls(notebook, "record")]:
        yield code[-1] if code else None, "the last code cell must call record(...)"


RULES: dict[str, Rule] = {
    "metadata": metadata,
    "outputs": no_outputs,
    "headings": headings,
    "parameters": parameters_cell,
    "names": names,
    "imports": imports,
    "lock": lock,
    "links": links,
    "length": length,
    "profiles": profiles,
    "record": record,
}


def _environment(notebook: Notebook) -> str:
    return str((notebook.metadata.get("gallery") or {}).get("environment") or "")
