"""Processes: long steps that never fall silent, and an end to everything that a run has started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

SIGN_OF_LIFE = 20.0  # seconds
RUN_FOLDER = "GALLERY_RUN_DIR"  # in the environment of the kernel and of all that it starts


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP asked this process to end; it leaves by the same way as Ctrl-C."""


def run_with_signs_of_life(
    command: Sequence[str],
    label: str,
    say: Callable[[str], None],
    *,
    env: Mapping[str, str],
    every: float = SIGN_OF_LIFE,
) -> tuple[int, str]:
    """Run a command, showing its lines as they come and a line with the time when it says nothing.

    Returns the exit status and the last lines of output. An interrupt ends the command before it goes on.
    """
    begun = last = time.monotonic()
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(env), errors="replace"
    ) as process:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(1):
                nonlocal last
                if time.monotonic() - last >= every:
                    last = time.monotonic()
                    say(f"{label} ... {last - begun:.0f} s")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last = time.monotonic()
                tail.append(line.rstrip())
                if not line.startswith(" + "):  # uv's list of what it installed: the lock says it
                    say(f"  {line.rstrip()}")
            return process.wait(), "\n".join(tail)
        except BaseException:
            process.terminate()
            raise
        finally:
            done.set()
            watcher.join()


def started_by(run_folder: Path) -> list[psutil.Process]:
    """Every process, wherever it hangs in the process tree, whose environment names this run's folder."""
    found = []
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if process.pid not in mine and process.environ().get(RUN_FOLDER) == str(run_folder):
                found.append(process)
        except (psutil.Error, OSError):  # gone, or someone else's
            continue
    return found


def end_all(run_folder: Path, *, kernel: int | None = None, grace: float = 2.0) -> int:
    """End every process of a run: asked first, killed after `grace` seconds. Returns how many there were.

    kernel: the kernel's process id; its descendants count too, should one have cleared its environment.
    """
    ended = 0
    for _ in range(5):  # a process may start another while we look
        processes = {process.pid: process for process in started_by(run_folder)}
        if kernel is not None:
            processes.update({process.pid: process for process in _tree(kernel)})
        alive = [process for process in processes.values() if _is_alive(process)]
        if not alive:
            break
        ended += len(alive)
        for process in alive:
            _send(process.terminate)
        _, stubborn = psutil.wait_procs(alive, timeout=grace)
        for process in stubborn:
            _send(process.kill)
        psutil.wait_procs(stubborn, timeout=5)
    return ended


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that clean-up runs; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise Terminated(signal.Signals(number).name)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold signals off while processes are being ended: an impatient second Ctrl-C must not leave them behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in held]
    try:
        yield
    finally:
        for number, handler in zip(held, before, strict=True):
            signal.signal(number, handler)


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _send(action: Callable[[], object]) -> None:
    with suppress(psutil.Error):
        action()
