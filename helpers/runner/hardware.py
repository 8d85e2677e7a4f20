"""What a run ran on: processor, memory, GPUs as the driver tells them, and the state of the repository."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GiB, operating system and GPUs."""
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "cpu": cpu_model(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(terse=True),
        "gpus": gpus(),
    }


def gpus() -> list[dict[str, str]]:
    """Name, memory and driver of each GPU that nvidia-smi lists; nothing where there is no driver."""
    fields = ("name", "memory.total", "driver_version", "uuid")
    listed = ask(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in (listed or "").splitlines() if line.count(", ") == len(fields) - 1]
    return [dict(zip(fields, row, strict=True)) for row in rows]


def cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_state(base: Path) -> dict[str, Any]:
    """Commit of the checkout and whether its files differ from it; both None outside a repository."""
    commit = ask(["git", "-C", str(base), "rev-parse", "--verify", "--quiet", "HEAD"])
    status = ask(["git", "-C", str(base), "status", "--porcelain"])
    return {
        "commit": commit.strip() if commit else None,
        "dirty": None if status is None else bool(status.strip()),
    }


def ask(command: list[str], timeout: float = 10) -> str | None:
    """What a command prints; None when there is no such command, it fails, or it takes too long."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
