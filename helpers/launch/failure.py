"""What went wrong in a job, as the one exception that its caller sees."""

import contextlib
import pickle
import re
import signal
from dataclasses import dataclass
from pathlib import Path

# What a rank reports when another one has gone: a consequence, never the cause.
CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|peer closed|socket.*closed", re.I
)
# Signals by which a process dies on its own account; SIGTERM is what the agent sends to the others.
CRASHES = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}
LOG_LINES = 15


class WorkerError(RuntimeError):
    """A rank raised an exception that could not be carried here as it was; its name and traceback are in the text."""


class WorkerDied(RuntimeError):
    """A rank ended without returning: by a signal, by os._exit or by sys.exit.

    rank: its number; signal: the signal's number, or None; exit_code: the exit code, or None after a signal.
    """

    def __init__(self, message: str, rank: int, signal: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.rank, self.signal, self.exit_code = rank, signal, exit_code


class WorkersStalled(TimeoutError):
    """The job passed its timeout, or a collective waited too long for a rank.

    stacks: each rank's Python stack at that moment; missing: the ranks that were not waiting in a collective.
    """

    def __init__(self, message: str, stacks: dict[int, str], missing: list[int]) -> None:
        super().__init__(message)
        self.stacks, self.missing = stacks, missing


class RemoteTraceback(Exception):
    """The traceback as the rank saw it, shown as the cause of the exception raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


@dataclass(frozen=True)
class Ended:
    """How one rank ended: the report that it left, if any, and its exit code (negative: a signal; None: unknown)."""

    rank: int
    report: dict | None
    exit_code: int | None
    stopped_by_us: bool
    order: int = 0  # torch's agent lists the rank that failed first, then those that it stopped for it

    @property
    def blame(self) -> tuple[int, int]:
        """Sort key: the likeliest cause of the job's failure first, and among equals the earliest."""
        moment = self.report["time_ns"] if self.report else 0
        if self.report and self.report["kind"] != "result":
            return (4 if self.is_consequence else 1), moment
        if self.stopped_by_us:
            return 5, moment
        code = self.exit_code or 0
        if code >= 0:
            returned = self.report is not None and code == 0
            return (6 if returned else 0), moment
        if -code in CRASHES:
            return 0, moment
        # an abort may follow another rank's end; SIGTERM is how the agent stops the rest
        return (5 if -code == signal.SIGTERM and self.order else 3 if -code == signal.SIGTERM else 2), moment

    @property
    def is_consequence(self) -> bool:
        """Whether this rank's exception only tells that another rank has gone."""
        report = self.report or {}
        by_torch = report.get("type") == "RuntimeError" or report.get("type", "").startswith("torch.distributed.")
        return bool(by_torch and CONSEQUENCES.search(report["message"]))


def read_report(path: Path) -> dict | None:
    """A rank's report (its result or its exception), or None when it left none."""
    if not path.exists():
        return None
    with path.open("rb") as file:  # private: in a folder of mode 0700 that only this user's ranks write
        return pickle.load(file)


def to_exception(ended: list[Ended], host: str, log_folder: Path, oom_kills: int) -> BaseException:
    """The exception that tells a failed job's cause, from how each of its ranks ended."""
    first = min(ended, key=lambda each: each.blame)
    if first.report and first.report["kind"] == "exception":
        error = _remote_exception(first, host)
        returned = [str(each.rank) for each in ended if each.report and each.report["kind"] == "result"]
        if first.is_consequence and returned:
            error.add_note(f"rank {', '.join(returned)} had returned already: its loop was shorter than the others'.")
        return error
    log = log_folder / f"rank{first.rank}.log"
    tail = f"\nIts last lines ({log}):\n{last_lines(log)}"
    if first.report and first.report["kind"] == "exit":
        code = first.report["code"]
        return WorkerDied(
            f"rank {first.rank} on {host} called sys.exit({code!r}) instead of returning: return a value, or raise."
            + tail,
            first.rank,
            exit_code=code if isinstance(code, int) else int(code is not None),
        )
    if first.exit_code is not None and first.exit_code < 0:
        number = -first.exit_code
        return WorkerDied(
            f"rank {first.rank} on {host} was ended by {_signal_name(number)}. {_hint(number, oom_kills)}{tail}",
            first.rank,
            signal=number,
        )
    code = first.exit_code or 0
    moment = "after the function had returned" if first.report else "before the function returned"
    return WorkerDied(
        f"rank {first.rank} on {host} exited with code {code} {moment}.{tail}", first.rank, exit_code=code
    )


def stalled(reason: str, stacks: dict[int, str], waiting: dict[int, bool], log_folder: Path) -> WorkersStalled:
    """The exception for a job that stands still. waiting: whether each rank's main thread is in a collective."""
    missing = [rank for rank, is_waiting in waiting.items() if not is_waiting]
    if not any(waiting.values()):
        verdict = "No rank was waiting in a collective: each was still at its own work."
    elif missing:
        late = ", ".join(map(str, missing))
        verdict = f"Missing from the collective that the others wait in: rank {late}."
    else:
        verdict = "Every rank was waiting in a collective: not the same one on each, so compare the lines below."
    shown = "\n".join(f"--- rank {rank} ---\n{stack.rstrip()}" for rank, stack in sorted(stacks.items()))
    return WorkersStalled(f"{reason} {verdict}\n{shown}\nFull stacks of all threads: {log_folder}", stacks, missing)


def last_lines(log: Path, count: int = LOG_LINES) -> str:
    """The last lines of a log that may be large, indented."""
    if not log.exists():
        return "  (no log)"
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 16_384))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()[-count:]
    return "\n".join(f"  {line}" for line in lines) or "  (empty)"


def _remote_exception(ended: Ended, host: str) -> BaseException:
    report = ended.report or {}
    where = f"raised on rank {ended.rank} on {host}"
    error: BaseException | None = None
    try:
        error = pickle.loads(report["exception"]) if report["exception"] else None
    except Exception:  # a class that pickles but does not unpickle: told as text below
        error = None
    if not isinstance(error, Exception):
        error = WorkerError(f"{report['type']} {where}: {report['message']}")
    error.add_note(f"{where}; its traceback is above.")
    error.__cause__ = RemoteTraceback(report["text"])
    for name, value in {"rank": ended.rank, "host": host, "remote_traceback": report["text"]}.items():
        with contextlib.suppress(AttributeError):  # a class with __slots__, or that uses the name itself
            setattr(error, name, value)
    return error


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has a number only
        return f"signal {number}"


def _hint(number: int, oom_kills: int) -> str:
    if number == signal.SIGKILL:
        if oom_kills > 0:
            return "The kernel's out-of-memory killer ended it: use a smaller micro-batch, or more memory."
        return (
            "SIGKILL that nobody sent is usually the out-of-memory killer (`dmesg | grep -i oom` tells): "
            "use a smaller micro-batch, fewer data loader workers, or more memory."
        )
    if number in CRASHES or number == signal.SIGABRT:
        return "That is a crash in native code; run with PYTHONFAULTHANDLER=1 and read this rank's log."
    return "Somebody sent it that signal."
