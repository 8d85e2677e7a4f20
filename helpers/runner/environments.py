"""Environments: each made with uv from its lock, stamped when complete, registered as a Jupyter kernel."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers.runner import locks
from helpers.runner.errors import BuildFailed
from helpers.runner.processes import run_with_signs_of_life
from helpers.runner.registry import uv_environment

STAMP = ".gallery-stamp"
KERNELS = Path(sys.prefix, "share", "jupyter", "kernels")  # where Jupyter started from here looks first
Say = Callable[[str], None]


def folder(base: Path, name: str) -> Path:
    return base / ".envs" / name


def python_of(base: Path, name: str) -> Path:
    return folder(base, name) / "bin" / "python"


def is_ready(base: Path, name: str) -> bool:
    """Whether the environment is complete and made from the lock as it is now."""
    stamp = folder(base, name) / STAMP
    try:
        return stamp.read_text() == _stamp(base, name) and python_of(base, name).exists()
    except OSError:
        return False


def make(base: Path, name: str, say: Say = print, *, rebuild: bool = False) -> Path:
    """Make the environment unless it is ready, register its kernel, and return its Python.

    Of two builders at once, the second waits for the first and uses its result. The stamp is written last, so
    that an interrupted build is recognised and begun again. Raises BadInput for a missing or stale lock, and
    BuildFailed when uv fails.
    """
    lock = locks.require_good_lock(base, name)
    if rebuild or not is_ready(base, name):
        with _one_builder(base, name, say):
            if rebuild or not is_ready(base, name):
                _build(base, name, lock, say)
    register_kernel(base, name)
    return python_of(base, name)


def register_kernel(base: Path, name: str) -> Path:
    """Write the kernel `name` under this interpreter's own prefix, unless it is there."""
    home = folder(base, name)
    specification = {
        "argv": [str(python_of(base, name)), "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": f"DDP gallery: {name}",
        "language": "python",
        # Tools that a recipe starts by name (torchrun, axolotl) are those of its environment.
        "env": {"PATH": f"{home / 'bin'}{os.pathsep}${{PATH}}", "VIRTUAL_ENV": str(home)},
        "metadata": {"debugger": True},
    }
    text = json.dumps(specification, indent=1) + "\n"
    path = KERNELS / name / "kernel.json"
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".kernel.json.{os.getpid()}")
        part.write_text(text)
        part.replace(path)
    return path


def freeze(python: Path | str) -> str:
    """The versions installed beside `python`, one `name==version` a line."""
    command = [locks.uv(), "pip", "freeze", "--python", str(python)]
    done = subprocess.run(command, text=True, capture_output=True, env=uv_environment())
    if done.returncode:
        raise BuildFailed(f"`uv pip freeze` of {python} failed: {done.stderr.strip()}")
    return done.stdout


def _build(base: Path, name: str, lock: Path, say: Say) -> None:
    home = folder(base, name)
    wanted = locks.specification(base, name)
    if home.exists():
        why = "its lock has changed" if (home / STAMP).exists() else "an earlier build was interrupted"
        say(f"environment {name}: making it again ({why})")
        shutil.rmtree(home)
    home.parent.mkdir(parents=True, exist_ok=True)
    count = sum("==" in line and not line.startswith("#") for line in lock.read_text().splitlines())
    say(f"environment {name}: {count} packages from {lock.relative_to(base)} into {home.relative_to(base)}")
    python = str(python_of(base, name))
    install = [locks.uv(), "pip", "install", "--python", python]
    interpreter = wanted.python or str(getattr(sys, "_base_executable", sys.executable))
    steps: dict[str, list[str]] = {
        "create": [locks.uv(), "venv", "--quiet", "--python", interpreter, str(home)],
        # Compiled once, here: every rank of every job imports torch, and where no bytecode may be written later
        # (PYTHONDONTWRITEBYTECODE, a read-only folder) each would compile it anew, at twice the seconds.
        "install packages": [*install, "--compile-bytecode", *wanted.install_options, "-r", str(lock)],
        "install this project": [*install, "--quiet", "--no-deps", "--editable", str(base)],
    }
    for step, command in steps.items():
        status, tail = run_with_signs_of_life(command, f"environment {name}: {step}", say, env=uv_environment())
        if status:
            raise BuildFailed(f"environment {name}: {step} failed (exit code {status}):\n{tail}")
    (home / STAMP).write_text(_stamp(base, name))
    say(f"environment {name}: ready")


def _stamp(base: Path, name: str) -> str:
    """What a finished environment was made from, and where: scripts in it hold absolute paths."""
    digest = hashlib.sha256(locks.lock_path(base, name).read_bytes()).hexdigest()
    return f"{digest}\n{folder(base, name)}\n"


@contextmanager
def _one_builder(base: Path, name: str, say: Say) -> Iterator[None]:
    """Hold .envs/NAME.lock; the system lets go of it when this process ends, however it ends."""
    path = base / ".envs" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"environment {name}: another process is making it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
