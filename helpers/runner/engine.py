"""How papermill runs our notebooks: live output, a time limit, and no process left on any way out."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines

from helpers.runner.live import Live
from helpers.runner.processes import RUN_FOLDER, end_all, uninterrupted

NAME = "gallery"
INTERRUPT_GRACE = 5.0  # seconds in which an interrupted cell may stop its ranks and end its tracking run


class TimeLimit:
    """A clock that interrupts the kernel at the limit, and ends its processes if that does not stop it."""

    def __init__(self, minutes: float, run_folder: Path) -> None:
        self.minutes = minutes
        self.run_folder = run_folder
        self.reached = False
        self.kernel: int | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> TimeLimit:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=INTERRUPT_GRACE + 20)

    def _watch(self) -> None:
        if self._done.wait(self.minutes * 60):
            return
        self.reached = True
        interrupt(self.kernel)
        if not self._done.wait(INTERRUPT_GRACE):
            end_all(self.run_folder, kernel=self.kernel)


class Client(PapermillNotebookClient):
    """papermill's client, showing each cell and its output while it runs."""

    def __init__(self, nb_man: Any, live: Live, limit: TimeLimit, sockets: Path, **settings: Any) -> None:
        super().__init__(nb_man, **settings)
        self.sockets = sockets
        self.live = live
        self.limit = limit

    def create_kernel_manager(self) -> Any:
        """A kernel reached through sockets of its own: no port to clash on, no one else to listen."""
        manager = super().create_kernel_manager()
        if not manager.has_kernel:
            manager.transport, manager.ip = "ipc", str(self.sockets / "kernel")
        return manager

    def papermill_execute_cells(self) -> None:
        self.limit.kernel = self.km.provisioner.pid
        try:
            super().papermill_execute_cells()
        except KeyboardInterrupt:
            interrupt(self.limit.kernel)
            _wait_for_children(self.limit.kernel)
            self.shutdown_kernel = "immediate"
            raise

    def execute_cell(self, cell: Any, cell_index: int, **settings: Any) -> Any:
        with self.live.cell(cell_index):
            return super().execute_cell(cell, cell_index, **settings)

    def process_message(self, *arguments: Any, **settings: Any) -> Any:
        output = super().process_message(*arguments, **settings)
        if output and output.output_type == "stream":
            self.live.write("".join(output.text), output.name)
        return output


class GalleryEngine(Engine):
    """papermill's engine interface; `live` and `limit` come through `papermill.execute_notebook`."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        live: Live,
        limit: TimeLimit,
        start_timeout: int = 120,
        **_: Any,
    ) -> None:
        environment = {**os.environ, RUN_FOLDER: str(limit.run_folder)}
        # The system allows a socket's path about 100 characters: run folders and some TMPDIRs are too deep.
        place = tempfile.gettempdir() if len(tempfile.gettempdir()) < 70 else "/tmp"
        with limit, tempfile.TemporaryDirectory(prefix="gallery-", dir=place) as sockets:
            client = Client(
                nb_man, live, limit, Path(sockets),
                kernel_name=kernel_name, startup_timeout=start_timeout, timeout=None, coalesce_streams=True,
            )  # fmt: skip
            try:
                with (limit.run_folder / "logs" / "kernel.log").open("w") as log:
                    client.execute(env=environment, stdout=log, stderr=log)
            finally:
                with uninterrupted():
                    end_all(limit.run_folder, kernel=limit.kernel)


papermill_engines.register(NAME, GalleryEngine)


def interrupt(kernel: int | None) -> None:
    """What the stop button of Jupyter does: SIGINT to the kernel and to what runs in its process group."""
    if kernel is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(os.getpgid(kernel), signal.SIGINT)


def _wait_for_children(kernel: int | None) -> None:
    """Give an interrupted cell time to stop its ranks by itself: it can do it in better order than we can."""
    deadline = time.monotonic() + INTERRUPT_GRACE
    time.sleep(0.5)
    while time.monotonic() < deadline:
        try:
            if kernel is None or not psutil.Process(kernel).children():
                return
        except psutil.Error:
            return
        time.sleep(0.1)
