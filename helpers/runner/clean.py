"""What the gallery has left on disk, and its removal by choice."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

CACHES = (".pytest_cache", ".ruff_cache", ".mypy_cache", "notebooks/.ipynb_checkpoints")


@dataclass(frozen=True)
class Heap:
    """Folders that go together, with their size in bytes."""

    kind: str  # "runs", "environments" or "caches"
    paths: tuple[Path, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.kind}: {len(self.paths)} folders, {self.size / 2**20:,.1f} MiB"


def heaps(base: Path, *, keep: int = 0) -> dict[str, Heap]:
    """What can be removed, by kind. keep: this many newest runs of each recipe stay."""
    runs: list[Path] = []
    for recipe in _folders(base / "runs"):
        finished = sorted(folder for folder in _folders(recipe) if not folder.is_symlink())
        runs += finished[: len(finished) - keep] if keep else [recipe]
    found = {
        "runs": runs,
        "environments": _folders(base / ".envs"),
        "caches": [base / name for name in CACHES if (base / name).exists()],
    }
    return {kind: Heap(kind, tuple(paths), sum(map(size, paths))) for kind, paths in found.items()}


def remove(heap: Heap) -> None:
    """Remove the folders, and links that then lead nowhere."""
    for path in heap.paths:
        shutil.rmtree(path)
        latest = path.parent / "latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink()


def size(folder: Path) -> int:
    """Bytes on disk below a folder; hard-linked files, as uv makes them, count once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(root, name))
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
