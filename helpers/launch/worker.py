"""What every rank executes: a fresh interpreter that loads the function, runs it and leaves a report.

Started by path, as `python worker.py <private folder>`, with RANK, WORLD_SIZE and the rest set by torch's agent. It
imports the standard library only until the log file is in place, so that everything a rank prints is in its log.
"""

import atexit
import contextlib
import faulthandler
import json
import linecache
import os
import pickle
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGUSR2
PARENT_CHECK_SECONDS = 0.5
STALL_GRACE_SECONDS = 20
# How gloo, torch's stores and monitored_barrier say that they waited for a rank in vain.
COLLECTIVE_TIMEOUT = re.compile(
    r"timed out waiting|timed out after|wait timeout after|application timeout|did not arrive within|"
    r"watchdog caught collective operation timeout|monitoredBarrier",
    re.I,
)


def main(private: Path) -> None:
    """Run the job found in the private folder as the rank that the environment names."""
    job = json.loads((private / "job.json").read_text())
    if (private / "cancelled").exists():  # the job is being stopped: do not start again
        os._exit(1)
    rank, attempt = int(os.environ["RANK"]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    _die_with(job["parent"], private)
    _redirect_output(Path(job["logs"]) / f"rank{rank}.log")
    stacks = (private / f"rank{rank}.stacks").open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    _write(private / f"rank{rank}.{attempt}.alive", {"pid": os.getpid(), "thread": threading.main_thread().ident})
    _prepare_interpreter(job)

    report = _run(private, rank, attempt)
    _flush()
    _write(private / f"rank{rank}.{attempt}.report", report)
    if report["kind"] != "result":
        os._exit(1)  # at once: destructors of a broken process group can hang, and the others are waiting
    _leave()


def _leave() -> None:
    """End this process as the interpreter would, but for the destruction of modules.

    That last step takes over a second once torch._dynamo is loaded (building a DistributedDataParallel loads it),
    and now and then a thread of gloo or autograd that outlives its owner makes it abort: "terminate called without an
    active exception", after a run in which nothing was wrong.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, ends thread pools
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


def _run(private: Path, rank: int, attempt: str) -> dict[str, Any]:
    try:
        function, args, kwargs = pickle.loads((private / "payload").read_bytes())
        value = function(*args, **kwargs)
        _check_model(value)
        _leave_process_group()
        return _result(value)
    except SystemExit as error:
        return _report("exit", code=error.code, text="")
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this file's frame
        text = "".join(traceback.format_exception(error))
        if _waited_in_vain(error) and not (private / "cancelled").exists():
            _flush()
            _write(private / f"rank{rank}.{attempt}.stalled", {"text": text, "message": _message(error)})
            time.sleep(STALL_GRACE_SECONDS)  # the parent now asks the other ranks where they are
        return _report(
            "exception",
            type=f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("__main__.").removeprefix(
                "builtins."
            ),
            message=_message(error),
            text=text,
            exception=_pickled_exception(error),
        )


def _waited_in_vain(error: BaseException) -> bool:
    """Whether a collective timed out: not any timeout, but one raised where a rank waits for the others."""
    if int(os.environ["WORLD_SIZE"]) == 1 or not COLLECTIVE_TIMEOUT.search(_message(error)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    places = ("/torch/distributed/", "/torch/autograd/", "/helpers/ranks.py")
    return bool(frames) and any(place in frames[-1].filename.replace(os.sep, "/") for place in places)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # an exception's own __str__ may be at fault
        return f"(its text cannot be shown: {type(failure).__name__})"


def _result(value: Any) -> dict[str, Any]:
    import cloudpickle

    try:
        return _report("result", value=cloudpickle.dumps(value), text="")
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__}, which cannot be pickled for the caller ({error}): return "
            "numbers, tensors or a state_dict, and save models to files."
        ) from error


def _report(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time_ns": time.time_ns(), **fields}


def _pickled_exception(error: BaseException) -> bytes | None:
    import cloudpickle

    try:
        return cloudpickle.dumps(error.with_traceback(None))
    except Exception:  # told by its name and text instead
        return None


def _check_model(value: Any) -> None:
    """A model that a job of several ranks hands back must be one model."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module) or int(os.environ["WORLD_SIZE"]) == 1:
        return
    if not torch.distributed.is_initialized():
        raise RuntimeError(
            "the function returned a model, but this rank never joined a process group (or has left it already): "
            "each rank trained alone. Call ranks.init() first, and let the launcher end the process group."
        )
    from helpers.ranks import same_weights

    same_weights(value)


def _leave_process_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _die_with(parent: int, private: Path) -> None:
    """End this rank, its data loader workers and the private folder when the notebook's kernel is gone."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_CHECK_SECONDS)
        shutil.rmtree(private, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    if os.getpgrp() != os.getpid():  # torch's agent gives each rank a session of its own; be sure of it
        os.setsid()
    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _redirect_output(log: Path) -> None:
    # the descriptors themselves, so that native code (NCCL, gloo) lands in the log too
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(descriptor, stream.fileno())
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    os.close(descriptor)


def _prepare_interpreter(job: dict[str, Any]) -> None:
    sys.path[:] = job["sys_path"]
    sys.argv[:] = [job["name"]]
    for name, source in job["cells"].items():
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    if os.environ.get("MPLBACKEND", "").startswith("module://"):  # the notebook's inline backend has no cell here
        os.environ["MPLBACKEND"] = "Agg"


def _write(path: Path, content: dict[str, Any]) -> None:
    """Readers see the whole file or none."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(pickle.dumps(content))
    partial.replace(path)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
