"""The Setup cell: does this kernel hold the recipe's environment, and if not, which command mends it?"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "notebooks" / "locks"


class WrongKernel(RuntimeError):
    """This kernel lacks what the recipe needs; the message names it and the command that mends it."""

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines instead of a traceback: the reader needs the sentence, not our stack."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Lock:
    """A lock as this kernel needs it: the packages the recipe names, and the versions locked for them."""

    environment: str
    path: Path
    direct: dict[str, bool]  # package -> must its version agree (the recipe pins it with ==)?
    versions: dict[str, set[str]] = field(default_factory=dict)  # more than one where platforms differ


def setup(environment: str, *, locks: Path | None = None) -> None:
    """Check that this kernel has the packages of `environment`, and say in one sentence what is running.

    environment: a recipe environment, the name of a file in notebooks/locks/ (without .txt).
    On Databricks (DATABRICKS_RUNTIME_VERSION is set) what is missing is installed from the lock and Python
    is restarted: run the cell once more. Elsewhere raises WrongKernel naming what is missing and the command.
    Raises ValueError for an environment that has no lock.
    """
    lock = read_lock(environment, locks or LOCKS)
    problems, notes = compare(lock)
    if problems and os.environ.get("DATABRICKS_RUNTIME_VERSION"):
        _install_on_databricks(lock)
        return
    if problems:
        raise WrongKernel(
            f"this kernel ({sys.executable}) is not the environment {environment!r}: {_some(problems)}. "
            f"Run `make lab NAME={environment}` in the repository and open the notebook there (its kernel is "
            f"{environment!r}), or run `%pip install -r {lock.path}` in this kernel and restart it."
        )
    print(f"Environment {environment}: {_this_kernel()}.")
    if notes:
        print(f"Other versions than the recipe was run with: {_some(notes)}.")


def read_lock(environment: str, locks: Path) -> Lock:
    """Read notebooks/locks/<environment>.txt: its `# direct:` lines and its pinned versions."""
    path = locks / f"{environment}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in locks.glob("*.txt"))) or "none"
        raise ValueError(f"environment={environment!r} has no lock {path}: known environments are {known}.")
    lock = Lock(environment, path, {})
    for line in path.read_text().splitlines():
        if line.startswith("# direct:"):
            requirement = line.removeprefix("# direct:").strip()
            lock.direct[_normal(_NAME.match(requirement)[0])] = "==" in requirement.split(";")[0]  # type: ignore[index]
        elif "==" in line and not line.startswith("#"):
            name, _, rest = line.partition("==")
            lock.versions.setdefault(_normal(name), set()).add(rest.split(";")[0].split()[0])
    return lock


def compare(lock: Lock) -> tuple[list[str], list[str]]:
    """Compare this kernel with the lock: (what stops the recipe, versions that merely differ).

    Only what the recipe names itself counts. A missing package stops it, and so does another version of one
    that the recipe pins exactly; a build suffix such as +cpu or +cu130 is not another version.
    """
    problems: list[str] = []
    notes: list[str] = []
    for name, exact in lock.direct.items():
        locked = lock.versions.get(name, set())
        wanted = " or ".join(sorted(locked))
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{name} {wanted} is missing".replace("  ", " "))
            continue
        if locked and found.split("+")[0] not in {version.split("+")[0] for version in locked}:
            (problems if exact else notes).append(f"{name} is {found}, locked {wanted}")
    return problems, notes


_NAME = re.compile(r"[A-Za-z0-9._-]+")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _some(items: list[str], most: int = 5) -> str:
    rest = f"; and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + rest


def _this_kernel() -> str:
    python = f"Python {platform.python_version()}"
    try:
        import torch
    except ImportError:  # an environment may have no torch of its own
        return f"{python}, {_cores()}"
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    where = f"{devices} x {torch.cuda.get_device_name(0)}" if devices else f"no GPU, {_cores()}"
    return f"{python}, torch {torch.__version__}, {where}"


def _cores() -> str:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{count} CPU core{'s' if count != 1 else ''}"


def _install_on_databricks(lock: Lock) -> None:
    """Install the lock into the notebook's environment, check it, and restart Python, as %pip would."""
    print(f"Installing {lock.path.name} into this notebook's environment; this takes minutes ...", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "-r", str(lock.path)]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise WrongKernel(f"installing {lock.path} failed (pip exit code {done.returncode}):\n{last}")
    importlib.invalidate_caches()
    problems, _ = compare(lock)
    if problems:  # restarting would only bring us back here, for ever
        raise WrongKernel(f"{lock.path} was installed, yet {_some(problems)}: restart the compute.")
    from databricks.sdk.runtime import dbutils

    print("Installed. Python restarts now: run this cell once more, then go on.", flush=True)
    dbutils.library.restartPython()
