"""Locks: one pinned requirements file per environment, and whether it still fits pyproject.toml."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from helpers.runner.errors import BadInput, BuildFailed, unknown

# What torch pins itself, by build: a lock without them serves CPU and CUDA builds alike.
TORCH_PINS = ("nvidia-*", "cuda-*", "triton")
KEEP = ("nvidia-ml-py",)  # a Python binding that others ask for by name; torch does not pin it
DEFAULT_PYTHON = "3.11"


@dataclass(frozen=True)
class Specification:
    """What one environment is compiled from, as pyproject.toml says it."""

    name: str
    requirements: tuple[str, ...]
    python: str | None = None  # None: the runner's own
    constraints: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    install_options: tuple[str, ...] = field(default=(), compare=False)

    @property
    def digest(self) -> str:
        """Changes whenever a lock made before would no longer be right."""
        parts = (sorted(self.requirements), self.python, self.constraints, sorted(self.overrides), self.drop)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def specification(base: Path, name: str) -> Specification:
    """The environment `name` of base/pyproject.toml; raises BadInput with the known ones if it has none."""
    project = _pyproject(base)
    extras = project["project"].get("optional-dependencies", {})
    groups = project.get("dependency-groups", {})
    known = environment_names(base)
    if name not in known:
        raise unknown("environment", name, known)
    table: dict[str, Any] = project.get("tool", {}).get("gallery", {}).get("environments", {}).get(name, {})
    requirements: list[str] = list(project["project"].get("dependencies", [])) if table.get("base") else []
    for extra in table.get("extras", [name]):
        if extra not in extras:
            raise unknown(f"extra of environment {name}", extra, extras)
        requirements += extras[extra]
    for group in table.get("groups", []):
        requirements += groups[group]
    return Specification(
        name,
        tuple(dict.fromkeys(requirements)),
        table.get("python"),
        tuple(table.get("constraints", [])),
        tuple(table.get("overrides", [])),
        tuple(table.get("drop", [])),
        tuple(table.get("install-options", [])),
    )


def environment_names(base: Path) -> list[str]:
    """Every environment that can be locked and made: one per extra, and those with a table of their own."""
    project = _pyproject(base)
    tables = project.get("tool", {}).get("gallery", {}).get("environments", {})
    return list(dict.fromkeys([*project["project"].get("optional-dependencies", {}), *tables]))


def lock_path(base: Path, name: str) -> Path:
    return base / "notebooks" / "locks" / f"{name}.txt"


def fault(base: Path, name: str) -> str | None:
    """Why the lock of `name` cannot be used, with the command that mends it; None when it is good."""
    wanted = specification(base, name)
    path = lock_path(base, name)
    remedy = f"Run `gallery lock {name}`."
    if not path.is_file():
        return f"environment {name} has no lock {path.relative_to(base)}. {remedy}"
    text = path.read_text()
    header = dict(re.findall(r"^# (digest|python): *(\S+)$", text, re.MULTILINE))
    if header.get("digest") != wanted.digest:
        before = set(re.findall(r"^# direct: *(.+)$", text, re.MULTILINE))
        now = set(wanted.requirements)
        changes = [f"+{item}" for item in sorted(now - before)] + [f"-{item}" for item in sorted(before - now)]
        what = ", ".join(changes) or "its settings changed"
        return f"{path.relative_to(base)} is stale: pyproject.toml has changed since ({what}). {remedy}"
    return None


def require_good_lock(base: Path, name: str) -> Path:
    """The lock's path; raises BadInput when it is missing or stale."""
    problem = fault(base, name)
    if problem:
        raise BadInput(problem)
    return lock_path(base, name)


def compile_lock(base: Path, name: str, *, upgrade: bool = False) -> Path:
    """Resolve the environment for every platform and write its lock; versions stay put unless `upgrade`.

    Raises BuildFailed with the resolver's explanation when there is no solution.
    """
    wanted = specification(base, name)
    path = lock_path(base, name)
    command = [uv(), "pip", "compile", "-", "--universal", "--no-header", "--no-annotate", "--quiet"]
    command += [
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--python-version",
        wanted.python or DEFAULT_PYTHON,
    ]
    for other in wanted.constraints:
        command += ["--constraints", str(require_good_lock(base, other))]
    with tempfile.TemporaryDirectory() as folder:
        output, overrides = Path(folder, "lock.txt"), Path(folder, "overrides.txt")
        if path.is_file() and not upgrade:
            output.write_text(path.read_text())  # uv keeps the versions that an existing output file holds
        if wanted.overrides:
            overrides.write_text("\n".join(wanted.overrides) + "\n")
            command += ["--overrides", str(overrides)]
        command += ["--output-file", str(output)]
        given = "\n".join(wanted.requirements)
        done = subprocess.run(command, input=given, text=True, capture_output=True, env=_registry_only())
        if done.returncode:
            raise BuildFailed(f"environment {name} cannot be resolved:\n{done.stderr.strip()}")
        resolved = output.read_text()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lock(path, wanted, resolved)
    return path


def write_lock(path: Path, wanted: Specification, resolved: str) -> None:
    """Write the lock: a header that says what it was compiled from, then the pinned lines."""
    lines = [line.strip() for line in resolved.splitlines() if line.strip() and not line.startswith("#")]
    lines = [_without_build(line) for line in lines if not _dropped(line, (*TORCH_PINS, *wanted.drop))]
    loose = [line for line in lines if "==" not in line.split(";")[0]]
    if loose:
        raise BuildFailed(f"environment {wanted.name} has lines that pin no version: {', '.join(loose)}.")
    header = [
        f"# Environment {wanted.name}: made by `gallery lock {wanted.name}`, not by hand.",
        f"# digest: {wanted.digest}",
        f"# python: {wanted.python or '>=' + DEFAULT_PYTHON}",
        *(f"# direct: {requirement}" for requirement in sorted(wanted.requirements, key=str.lower)),
    ]
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text("\n".join([*header, "", *lines]) + "\n")
    part.replace(path)


def uv() -> str:
    """The uv that came with the runner's own environment."""
    from uv import find_uv_bin

    return os.fsdecode(find_uv_bin())


def _pyproject(base: Path) -> dict[str, Any]:
    path = base / "pyproject.toml"
    try:
        return tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from error


def _registry_only() -> dict[str, str]:
    """For resolving: a local folder of wheels would put one machine's builds into everyone's lock."""
    from helpers.runner.registry import uv_environment

    return {key: value for key, value in uv_environment().items() if key != "UV_FIND_LINKS"}


def _dropped(line: str, patterns: tuple[str, ...]) -> bool:
    name = re.split(r"[=<>!~;\[ ]", line, maxsplit=1)[0].lower()
    return name not in KEEP and any(fnmatch(name, pattern) for pattern in patterns)


def _without_build(line: str) -> str:
    """`torch==2.13.0+cpu` -> `torch==2.13.0`: the build is the machine's choice, not the lock's."""
    return re.sub(r"(==[^+;\s]+)\+[^;\s]+", r"\1", line)
