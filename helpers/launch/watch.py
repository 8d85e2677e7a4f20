"""The parent's eyes on a running job: rank 0's output into the cell, the clock, stalls, and ranks that will not end."""

import contextlib
import contextvars
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from .failure import WorkersStalled, last_lines, read_report, stalled
from .worker import STACK_SIGNAL

POLL_SECONDS = 0.1
GRACE_SECONDS = 2.0  # what a rank gets to end by itself once another one is gone
STACK_SECONDS = 2.0  # what a rank gets to write its stacks
SHOWN_BYTES = 2**20  # of rank 0's output in the cell; the log file has all of it
READ_BYTES = 2**16
STACK_FRAMES = 14
# Frames in which a main thread waits for other ranks. DDP's all-reduce runs inside backward().
WAITING = re.compile(
    r'File ".*/torch/distributed/(?!launcher|run).*"|in (_engine_)?run_backward|in barrier|in all_mean'
)


class Watch:
    """Follows one job from a thread of its own while torch's agent holds the main one.

    private: the folder where ranks leave their reports; logs: where their output goes; timeout: seconds or None.
    After `stop`, `.stalled` is the exception of a job that was ended for standing still, and `.stopped` holds the
    ranks that were killed here.
    """

    def __init__(self, private: Path, logs: Path, world_size: int, timeout: float | None, max_restarts: int) -> None:
        self.stalled: WorkersStalled | None = None
        self.stopped: set[int] = set()
        self._private, self._logs, self._world_size = private, logs, world_size
        self._timeout, self._max_restarts = timeout, max_restarts
        self._deadline = time.monotonic() + timeout if timeout else None
        self._alone_since: float | None = None
        self._attempt = 0
        self._output = _Follower(logs / "rank0.log")
        self._done = threading.Event()
        # The kernel routes a thread's prints to the cell whose context the thread carries.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._watch,), name="rank-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the last of rank 0's output, and end every rank that is still there."""
        self._done.set()
        self._thread.join()
        self._kill(self._alive())
        for report in self._private.glob("rank*.alive"):  # what a rank has started and left running goes with it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg((read_report(report) or {})["pid"], signal.SIGKILL)
        self._output.finish()

    def _watch(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            looks = (self._check_clock, self._check_collectives, self._end_leftovers, self._notice_restart)
            for look in (*looks, self._output.show):
                # a full disk or a closed terminal must not end the watch over the job
                with contextlib.suppress(Exception):
                    look()

    def _notice_restart(self) -> None:
        following = self._attempt + 1
        if any(self._file(rank, "alive", following).exists() for rank in range(self._world_size)):
            self._attempt = following
            self._alone_since = None
            print(f"distributed: a rank failed; all ranks start again (restart {following} of {self._max_restarts}).")

    def _check_clock(self) -> None:
        if self.stalled is None and self._deadline is not None and time.monotonic() > self._deadline:
            self._stall(f"the job did not end within timeout={self._timeout:g} s.")

    def _check_collectives(self) -> None:
        for rank in range(self._world_size if self.stalled is None else 0):
            if (report := read_report(self._file(rank, "stalled"))) is not None:
                reason = f"a collective on rank {rank} waited in vain ({report['message'].splitlines()[0][:200]})."
                self._stall(reason, {rank: report["text"]})
                return

    def _stall(self, reason: str, known: dict[int, str] | None = None) -> None:
        """Ask every rank for its stacks, then end them all. known: stacks of ranks that have told already."""
        stacks, waiting = dict(known or {}), dict.fromkeys(known or {}, True)
        try:
            self._collect(stacks, waiting)
        finally:
            self.stalled = stalled(reason, stacks, waiting, self._logs)
            (self._private / "cancelled").touch()
            self._kill(self._alive())

    def _collect(self, stacks: dict[int, str], waiting: dict[int, bool]) -> None:
        """Add the stacks of the ranks that have not told yet, and whether each waits in a collective."""
        alive = self._alive()
        threads = {rank: self._read(rank)["thread"] for rank in alive}
        for pid in alive.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, STACK_SIGNAL)
        limit = time.monotonic() + STACK_SECONDS
        for rank in range(self._world_size):
            path = self._private / f"rank{rank}.stacks"
            while rank in alive and not _complete(path) and time.monotonic() < limit:
                time.sleep(POLL_SECONDS)
            text = path.read_text(errors="replace") if path.exists() else ""
            with contextlib.suppress(OSError):
                (self._logs / f"rank{rank}.stacks.txt").write_text(text)
            if rank in stacks:
                continue
            if rank not in alive:
                returned = self._file(rank, "report").exists()
                stacks[rank] = "has returned" if returned else "has not started, or has ended without a word"
            else:
                stacks[rank] = main_thread(text, threads[rank]) or last_lines(self._logs / f"rank{rank}.log")
            waiting[rank] = bool(WAITING.search(stacks[rank]))

    def _end_leftovers(self) -> None:
        """A rank that ignores the agent's SIGTERM, or hangs in a collective whose peer has gone, is killed."""
        alive = self._alive()
        if self.stalled is not None:  # also a rank that has only just started
            self._kill(alive)
        gone = set(self._started()) - set(alive)
        unfinished = [rank for rank in gone if (read_report(self._file(rank, "report")) or {}).get("kind") != "result"]
        if not unfinished or not alive:
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif time.monotonic() - self._alone_since > GRACE_SECONDS:
            self._kill(alive)

    def _kill(self, ranks: dict[int, int]) -> None:
        for rank, pid in ranks.items():
            self.stopped.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # its data loader workers with it

    def _started(self) -> list[int]:
        return [rank for rank in range(self._world_size) if self._file(rank, "alive").exists()]

    def _alive(self) -> dict[int, int]:
        """Process ids by rank of those that have started and not ended."""
        pids = {rank: self._read(rank)["pid"] for rank in self._started()}
        return {rank: pid for rank, pid in pids.items() if _exists(pid)}

    def _read(self, rank: int) -> dict:
        return read_report(self._file(rank, "alive")) or {}

    def _file(self, rank: int, kind: str, attempt: int | None = None) -> Path:
        return self._private / f"rank{rank}.{self._attempt if attempt is None else attempt}.{kind}"

    def reports(self) -> list[dict | None]:
        """By rank, what each left in the last attempt."""
        return [read_report(self._file(rank, "report")) for rank in range(self._world_size)]


class _Follower:
    """Copies a growing log into the cell: soon, within bounds, and with progress bars kept on one line."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._position = 0
        self._shown = 0

    def show(self) -> None:
        """Show what has come since the last call; past SHOWN_BYTES only the file gets it."""
        while self._shown < SHOWN_BYTES and (chunk := self._read()):
            self._shown += len(chunk)
            self._emit("\n".join(map(_newest_state, chunk.decode(errors="replace").split("\n"))))
            if self._shown >= SHOWN_BYTES:
                self._emit(f"\ndistributed: more output than fits a cell; all of it is in {self._log}\n")

    def finish(self) -> None:
        self.show()
        if self._shown >= SHOWN_BYTES:
            self._emit(f"distributed: the last lines of rank 0:\n{last_lines(self._log)}\n")

    def _emit(self, text: str) -> None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):  # a closed terminal loses output, and nothing else
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()

    def _read(self) -> bytes:
        if not self._log.exists():
            return b""
        with self._log.open("rb") as file:
            file.seek(self._position)
            chunk = file.read(READ_BYTES)
        for _ in range(3):  # a character of several bytes may be half written
            if chunk and _ends_inside_character(chunk):
                chunk = chunk[:-1]
        self._position += len(chunk)
        return chunk


def _newest_state(line: str) -> str:
    """Of a progress bar that was drawn several times, the last drawing."""
    return line[max(0, line.rstrip("\r").rfind("\r")) :]


def main_thread(stacks: str, ident: int) -> str:
    """Of faulthandler's dump, the frames of the thread with this ident, the innermost first."""
    for block in stacks.split("\n\n"):
        header, _, frames = block.partition("\n")
        if f"0x{ident:016x}" in header:
            return "\n".join(frames.splitlines()[:STACK_FRAMES])
    return ""


def _complete(path: Path) -> bool:
    """faulthandler writes the signalled thread last, which on a quiet process is the main thread."""
    return path.exists() and "Current thread" in path.read_text(errors="replace")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _ends_inside_character(chunk: bytes) -> bool:
    try:
        chunk.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False
