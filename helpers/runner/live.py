"""What a running notebook shows: a line per cell, its output as it comes, and a sign of life."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import nbformat

SIGN_OF_LIFE = 30.0  # seconds without output


class Live:
    """Writes the progress of one notebook; `seconds` maps a cell's index to how long it took.

    On a terminal, output passes through as it is, so that progress bars move. Elsewhere (a log file, CI) a
    line that is rewritten by carriage returns appears once, as it ended.
    """

    def __init__(self, notebook: nbformat.NotebookNode, stream: TextIO | None = None) -> None:
        self.labels = cell_labels(notebook)
        self.seconds: dict[int, float] = {}
        self.current: int | None = None
        self._stream = stream or sys.stdout
        self._raw = self._stream.isatty()
        self._partial: dict[str, str] = {}  # stream name -> a line that has not ended
        self._at_line_start = True
        self._last = time.monotonic()
        self._lock = threading.Lock()

    @contextmanager
    def cell(self, index: int) -> Iterator[None]:
        """Announce a cell, time it, and say now and then that it is still running."""
        if index not in self.labels:  # text cells, and code cells with nothing in them
            yield
            return
        number = list(self.labels).index(index) + 1
        self._line(f"[{number:>2}/{len(self.labels)}] {self.labels[index]}")
        self.current = index
        begun = time.monotonic()
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(begun, done), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            self.seconds[index] = time.monotonic() - begun
            self.flush()
            if self.seconds[index] >= 1:
                self._line(f"        {self.seconds[index]:.1f} s")

    def write(self, text: str, name: str = "stdout") -> None:
        """Show what the cell printed to one of its streams."""
        with self._lock:
            self._last = time.monotonic()
            if self._raw:
                self._stream.write(text)
                self._at_line_start = text.endswith(("\n", "\r"))
            else:
                *lines, partial = (self._partial.pop(name, "") + text).split("\n")
                if partial:
                    self._partial[name] = partial[partial.rfind("\r", 0, -1) + 1 :]
                for line in lines:
                    self._stream.write(_as_it_ended(line) + "\n")
            self._stream.flush()

    def flush(self) -> None:
        """End an unfinished line."""
        with self._lock:
            for line in self._partial.values():
                self._stream.write(_as_it_ended(line) + "\n")
            self._partial.clear()
            if not self._at_line_start:
                self._stream.write("\n")
            self._at_line_start = True
            self._stream.flush()

    def _line(self, text: str) -> None:
        self.flush()
        with self._lock:
            self._stream.write(text + "\n")
            self._stream.flush()
            self._last = time.monotonic()

    def _watch(self, begun: float, done: threading.Event) -> None:
        while not done.wait(1):
            if time.monotonic() - self._last >= SIGN_OF_LIFE:
                self._line(f"        ... running for {time.monotonic() - begun:.0f} s")


def cell_labels(notebook: nbformat.NotebookNode) -> dict[int, str]:
    """Index of each code cell -> "section | first line of code", for progress lines and records."""
    labels: dict[int, str] = {}
    section = ""
    for index, cell in enumerate(notebook.cells):
        lines = [line.strip() for line in cell.source.splitlines() if line.strip()]
        if cell.cell_type == "markdown":
            headings = [line.lstrip("# ") for line in lines if line.startswith("#")]
            section = headings[-1] if headings else section
        elif cell.cell_type == "code" and lines:
            code = next((line for line in lines if not line.startswith("#")), lines[0])
            label = f"{section} | {code}" if section else code
            labels[index] = label if len(label) <= 90 else label[:87] + "..."
    return labels


def _as_it_ended(line: str) -> str:
    return line.rstrip("\r").rsplit("\r", 1)[-1]
