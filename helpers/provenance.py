"""What is written down about a run besides its numbers: settings without secrets, versions, commit, hardware."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_SECRET = re.compile(r"(^|_)(secret|password|passwd|credentials?|(api|access|private)_?key)(_|$)", re.I)
_TOKEN = re.compile(r"(^|_)(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!mask_)token$", re.I)


def masked(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with those hidden whose name says that they are secrets (hf_token, api_key, password ...)."""

    def mask(key: Any, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: mask(name, part) for name, part in value.items()}
        secret = value is not None and (_SECRET.search(str(key)) or _TOKEN.search(str(key)))
        return "(not logged)" if secret else value

    return {key: mask(key, value) for key, value in values.items()}


def first_lines(error: BaseException, count: int) -> str:
    """The type of an error and the first lines of its message, without passwords in addresses."""
    lines = shown(f"{type(error).__name__}: {error}").strip().splitlines()[:count]
    return "\n".join(lines)[:500]


def shown(text: str) -> str:
    """A URI, or a text with URIs in it, without their users and passwords."""
    return re.sub(r"(?<=://)[^/\s@]+@", "", text)


def versions() -> dict[str, str]:
    """The versions of Python, torch, MLflow and these helpers, as far as they are installed."""
    found = {"version_python": platform.python_version()}
    for package, name in (("torch", "torch"), ("mlflow", "mlflow"), ("ddp-gallery", "helpers")):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[f"version_{name}"] = metadata.version(package)
    return found


def git_commit() -> str:
    """The commit that these helpers are of, with a note if files were changed since; "" without git."""
    here = Path(__file__).resolve().parent
    commit = _output("git", "-C", str(here), "rev-parse", "HEAD")
    changed = commit and _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return f"{commit} with changes" if changed else commit


def hardware() -> str:
    """This machine in a line: "8xNVIDIA H100 80GB HBM3; 96 CPU cores, 1024 GiB; Linux x86_64"."""
    gpus = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()  # no CUDA context here
    kinds = " + ".join(f"{gpus.count(kind)}x{kind}" for kind in dict.fromkeys(gpus)) or "no GPU"
    memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB" if _posix() else ""
    return f"{kinds}; {os.cpu_count()} CPU cores{memory}; {platform.system()} {platform.machine()}"


def _posix() -> bool:
    return sys.platform != "win32"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
