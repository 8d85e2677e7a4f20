"""Metrics on their way to MLflow: a file that rank 0 appends to and that the run's owner sends in the background.

The file comes first, so a rank that is killed, or a server that is lost, costs no metric and no second of training.
"""

import atexit
import json
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

_BATCH = 1000  # metrics in one request; MLflow takes no more


class Journal:
    """A jsonl file: first the run it belongs to, then a list [[name, value, step, milliseconds], ...] a line.

    Beside it, a file ending in .sent holds how many bytes have reached the server.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mark = path.with_suffix(".sent")

    @classmethod
    def create(cls, path: Path, tracking_uri: str, run_id: str) -> "Journal":
        """Start the journal of a run; one that is there already goes on."""
        path.parent.mkdir(parents=True, exist_ok=True)
        journal = cls(path)
        if not path.exists():
            journal._add({"tracking_uri": tracking_uri, "run_id": run_id})
        return journal

    @classmethod
    def create_temporary(cls, tracking_uri: str, run_id: str) -> "Journal":
        """A journal for a process that cannot see its parent's."""
        return cls.create(Path(tempfile.mkdtemp()) / f"metrics-{run_id}.jsonl", tracking_uri, run_id)

    def append(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of one step, stamped with the present time."""
        now = int(time.time() * 1000)
        self._add([[name, value, step, now] for name, value in metrics.items()])

    def close(self, closing: Mapping[str, Any]) -> None:
        """Add how the run ended: {"status": ..., "error": ..., "traceback": ...}."""
        self._add(dict(closing))

    def send(self) -> None:
        """Send what has not been sent. Raises what MLflow raises; what was sent before stays marked."""
        for rows, closing, end in self._unsent():
            self._send(rows, closing)
            self.mark.write_text(str(end))

    def send_all(self) -> None:
        """Send the rest and remove the files."""
        self.send()
        self.path.unlink()
        self.mark.unlink(missing_ok=True)

    def unsent(self) -> int:
        """How many metrics have not reached the server."""
        return sum(len(rows) for rows, _, _ in self._unsent())

    def _add(self, entry: Any) -> None:
        with open(self.path, "a") as file:  # one write a line, so that a reader never sees two halves mixed
            file.write(json.dumps(entry) + "\n")

    def _unsent(self) -> Iterator[tuple[list[list[Any]], dict[str, Any] | None, int]]:
        """Batches of (metrics, closing or None, the position after them)."""
        rows: list[list[Any]] = []
        with open(self.path, "rb") as file:
            end = int(self.mark.read_text()) if self.mark.exists() else len(file.readline())
            file.seek(end)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                entry = json.loads(line)
                if rows and (isinstance(entry, dict) or len(rows) + len(entry) > _BATCH):
                    yield rows, None, end
                    rows = []
                end += len(line)
                if isinstance(entry, dict):
                    yield [], entry, end
                else:
                    rows += entry
        if rows:
            yield rows, None, end

    def _send(self, rows: list[list[Any]], closing: dict[str, Any] | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        with open(self.path) as file:
            owner = json.loads(file.readline())
        _check_listening(owner["tracking_uri"])
        client, run_id = MlflowClient(owner["tracking_uri"]), owner["run_id"]
        for begin in range(0, len(rows), _BATCH):
            metrics = [Metric(name, value, when, step) for name, value, step, when in rows[begin : begin + _BATCH]]
            client.log_batch(run_id, metrics=metrics)
        if closing is not None:
            if "error" in closing:
                client.set_tag(run_id, "error", closing["error"])
                client.log_text(run_id, closing["traceback"], "error.txt")
            client.set_terminated(run_id, closing["status"])


class Sender:
    """A thread that sends a journal each second, and warns once when the server is lost."""

    def __init__(self, journal: Journal, every: float = 1.0) -> None:
        self.journal, self._every = journal, every
        self._lost: Exception | None = None
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="metrics to MLflow")
        self._thread.start()
        atexit.register(self.stop)

    def stop(self, closing: Mapping[str, Any] | None = None, patience: float = 30.0) -> None:
        """Send the rest, within `patience` seconds if need be in vain, and remove the journal if all was sent."""
        if self._stop.is_set():
            return
        self._stop.set()
        atexit.unregister(self.stop)
        if closing is not None:
            self.journal.close(closing)
        self._thread.join(patience)
        if self._thread.is_alive():
            self._warn(TimeoutError("the last request is still waiting"))
        elif self._try():
            self.journal.send_all()
        if self._lost is not None:
            self._tell(
                f"{self.journal.unsent()} metrics did not reach MLflow and are kept: "
                f"helpers.tracking.flush({str(self.journal.path)!r}) sends them."
            )

    def _run(self) -> None:
        wait = self._every
        while not self._stop.wait(wait):
            wait = self._every if self._try() else min(2 * wait, 30)

    def _try(self) -> bool:
        try:
            self.journal.send()
        except Exception as error:
            self._warn(error)
            return False
        self._lost = None
        return True

    def _warn(self, error: Exception) -> None:
        self._lost = error
        if not self._warned:
            self._warned = True
            self._tell(
                f"MLflow does not answer ({type(error).__name__}). Training goes on; its metrics are kept in "
                f"{self.journal.path} until the server is back."
            )

    def _tell(self, text: str) -> None:
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _check_listening(tracking_uri: str) -> None:
    """Raise OSError within seconds when nothing listens there, where MLflow would try again for minutes."""
    parts = urlsplit(tracking_uri)
    if parts.scheme in ("http", "https") and parts.hostname and not getproxies():
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname, port), timeout=3).close()
