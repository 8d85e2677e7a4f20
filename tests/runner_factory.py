"""Makes small galleries on the spot for the tests of the runner, and drives its command line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

REPOSITORY = Path(__file__).resolve().parents[1]

PYPROJECT = """
[build-system]
requires = ["uv_build>=0.9,<1"]
build-backend = "uv_build"

[project]
name = "demo-gallery"
version = "0"
requires-python = ">=3.11"
dependencies = []

[project.optional-dependencies]
demo = ["iniconfig==2.1.0"]

[tool.uv.build-backend]
module-root = ""
module-name = "demo"
"""

PARAMETERS = """
profile: str = "smoke"  # smoke or big
learning_rate: float = 0.1  # of the optimizer
steps: int | None = None  # None: the profile's own
"""

RECORD = """
from helpers import record
record({"accuracy": 0.97, "baseline": 0.5}, ["accuracy >= 0.95", "accuracy > baseline"]);
"""


def make_gallery(root: Path) -> Path:
    """A root with a pyproject.toml and no notebooks yet."""
    (root / "notebooks" / "locks").mkdir(parents=True)
    (root / "demo").mkdir()
    (root / "demo" / "__init__.py").write_text('"""Nothing."""\n')
    (root / "pyproject.toml").write_text(PYPROJECT)
    return root


def add_notebook(
    root: Path,
    *sources: str,
    name: str = "01_demo",
    parameters: str | None = PARAMETERS,
    record: str = RECORD,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A notebook with a parameters cell, the given code cells under `## Train`, and a recording cell."""
    notebook = new_notebook()
    notebook.metadata["kernelspec"] = {"name": "demo", "display_name": "demo", "language": "python"}
    notebook.metadata["gallery"] = {
        "title": "Demo", "summary": "Shows the runner.", "environment": "demo", "framework": "none",
        "task": "none", "strategy": "none",
        "profiles": {
            "smoke": {"hardware": "2 CPU processes", "minutes": 1, "ran": True},
            "big": {"hardware": "8xH100", "minutes": 30, "ran": False},
        },
        **(metadata or {}),
    }  # fmt: skip
    cells = [new_markdown_cell("# Demo")]
    if parameters is not None:
        cells.append(new_code_cell(parameters.strip(), metadata={"tags": ["parameters"]}))
    cells.append(new_markdown_cell("## Train"))
    cells += [new_code_cell(source.strip()) for source in (*sources, record) if source]
    notebook.cells = cells
    path = root / "notebooks" / f"{name}.ipynb"
    nbformat.write(notebook, path)
    return path


def environment(root: Path) -> dict[str, str]:
    """The environment in which `gallery` works on `root`, and kernels find this repository's helpers."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "GALLERY_ROOT": str(root), "PYTHONPATH": os.pathsep.join(paths)}


def start(root: Path, *arguments: str) -> subprocess.Popen[str]:
    """`gallery` as a process of its own."""
    command = [sys.executable, "-u", "-m", "helpers.runner.cli", *arguments]
    return subprocess.Popen(command, env=environment(root), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Read a process's output up to the line that holds a word, and return that line."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"the process ended ({process.wait()}) without saying {word!r}")


def runs(root: Path) -> list[Path]:
    """The run folders below a gallery, oldest first."""
    return sorted(path for path in (root / "runs").glob("*/*") if path.is_dir() and not path.is_symlink())


def alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that still run."""
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
