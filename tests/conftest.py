"""What several tests share: a watch for whatever a job may leave behind, and real Jupyter kernels."""

import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test's logs and stores go to a folder of its own, not into the checkout."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("GALLERY_RUN_DIR", str(folder))
    monkeypatch.setenv("GALLERY_RUNS", str(tmp_path / "runs"))
    return folder


@pytest.fixture
def private_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A temporary directory that only this test's jobs write to."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def nothing_left(private_tmp: Path) -> Iterator[Callable[[], list[str]]]:
    """Check at the test's end that no rank, no private file and no shared memory is left; callable meanwhile."""
    shared_memory = set(_listing("/dev/shm"))

    def leftovers() -> list[str]:
        ranks = [f"process {pid}" for pid in rank_processes(private_tmp)]
        files = [str(path) for path in private_tmp.glob("ddp-gallery-*")]
        shared = [f"/dev/shm/{name}" for name in set(_listing("/dev/shm")) - shared_memory if "torch" in name]
        return ranks + files + shared

    yield leftovers
    assert eventually(lambda: not leftovers(), 5), leftovers()


def rank_processes(private_tmp: Path) -> list[int]:
    """Process ids of ranks whose private folder lies below `private_tmp`."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if f"{private_tmp}/ddp-gallery-" in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition becomes true within so many seconds."""
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


class Kernel:
    """A real Jupyter kernel of this interpreter, driven as a notebook front end drives it."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", env=dict(os.environ))
        self.run(f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})")

    def start(self, code: str) -> str:
        """Send a cell and return its message id at once."""
        return self.client.execute(code)

    def run(self, code: str, timeout: float = 120) -> tuple[str, dict | None]:
        """Execute a cell; returns its stream output and its error (ename, evalue), or None."""
        return self.finish(self.start(code), timeout)

    def outputs(self, message_id: str, timeout: float = 120) -> Iterator[tuple[float, str, dict]]:
        """(seconds since now, kind, content) for each message of a cell, as it arrives, until the cell ends."""
        begin = time.monotonic()
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"the cell did not end within {timeout} s") from None
            if message["parent_header"].get("msg_id") != message_id:
                continue
            yield time.monotonic() - begin, message["msg_type"], message["content"]
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return

    def finish(self, message_id: str, timeout: float = 120) -> tuple[str, dict | None]:
        text, error = "", None
        for _, kind, content in self.outputs(message_id, timeout):
            if kind == "stream":
                text += content["text"]
            elif kind == "error":
                error = content
        return text, error

    def stop(self) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)


@pytest.fixture
def new_kernel(private_tmp: Path) -> Iterator[Callable[[], Kernel]]:
    """Starts kernels that share this test's temporary directory, and stops them at its end."""
    kernels: list[Kernel] = []

    def start() -> Kernel:
        kernels.append(Kernel())
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.stop()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Write a Python script and run it by a command such as ["-m", "torch.distributed.run", ...]."""

    def run(code: str, *command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{code}")
        return subprocess.run(
            [sys.executable, *command, str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )

    return run


def _listing(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []
