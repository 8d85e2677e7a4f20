"""Ranks as processes of this machine: fresh interpreters under torch's own elastic agent."""

import contextlib
import dataclasses
import functools
import inspect
import json
import logging
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .. import places
from . import payload
from .failure import Ended, WorkerError, to_exception
from .watch import Watch
from .worker import __file__ as WORKER_FILE

SHUTDOWN_SECONDS = 3
_ONE_AT_A_TIME = threading.Lock()
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class NotEnoughGPUs(ValueError):
    """More GPUs are asked for than this machine shows."""


def processes_for(gpus: int | None, gpu_type: str | None) -> int:
    """How many processes to start: as many as asked for, or one per visible GPU.

    Raises NotEnoughGPUs naming both counts when the machine has GPUs, but fewer than asked for.
    """
    visible = torch.cuda.device_count()  # asks the driver without creating a CUDA context in the notebook
    if visible == 0:
        _say_once(f"distributed: no GPU here, so gpus={gpus or 1} starts {gpus or 1} CPU process(es) on gloo.")
        return gpus or 1
    if gpus is not None and gpus > visible:
        raise NotEnoughGPUs(
            f"gpus={gpus} is asked for, but torch sees {visible} GPU(s) here "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}): pass gpus={visible} and adapt "
            "micro_batch or accumulation, so that the global batch stays what you mean."
        )
    if gpu_type and gpu_type.lower() not in (name := torch.cuda.get_device_name(0)).lower():
        _say_once(f"distributed: gpu_type={gpu_type!r} is asked for; this machine has {name}.")
    return gpus or visible


def run(
    function: Callable[..., Any],
    bound: inspect.BoundArguments,
    processes: int,
    timeout: float | None,
    max_restarts: int,
) -> list[Any]:
    """Run the function in `processes` fresh interpreters and return their values by rank.

    timeout: seconds for the whole job, or None; max_restarts: how often all ranks may be started anew.
    Raises what a rank raised, WorkerDied, WorkersStalled, or payload.PayloadError before anything starts. Whatever
    happens, no process, port or private file of the job is left when this returns.
    """
    content, cells = payload.dump(function, bound)
    name = getattr(function, "__name__", type(function).__name__)
    logs = _log_folder(name)
    private = Path(tempfile.mkdtemp(prefix="ddp-gallery-"))  # mode 0700: what is unpickled comes from here alone
    try:
        _private_file(private / "payload", content)
        job = {
            "parent": os.getpid(),
            "name": name,
            "logs": str(logs),
            "sys_path": [os.path.abspath(path) for path in sys.path],
            "cells": cells,
        }
        _private_file(private / "job.json", json.dumps(job).encode())
        watch = Watch(private, logs, processes, timeout, max_restarts)
        oom_kills = _oom_kills()
        try:
            with _ONE_AT_A_TIME:  # the agent reads its settings from this process's environment
                failures = _launch(private, logs, processes, max_restarts, watch)
        except SignalException as error:  # all ranks are stopped; now this process gets what it was sent
            shutil.rmtree(private, ignore_errors=True)
            os.kill(os.getpid(), error.sigval)
            raise
        if watch.stalled is not None:
            raise watch.stalled
        reports = watch.reports()
        for rank, report in enumerate(reports):
            if report and report["text"]:  # into the log only: the cell gets it with the exception
                path = logs / f"rank{rank}.log"
                with contextlib.suppress(OSError), path.open("a", encoding="utf-8", errors="backslashreplace") as log:
                    log.write(report["text"])
        if failures is None and all(report and report["kind"] == "result" for report in reports):
            return [_value(rank, report) for rank, report in enumerate(reports)]
        codes = failures or {}
        order = {rank: position for position, rank in enumerate(codes)}
        ended = [
            Ended(rank, report, codes.get(rank), rank in watch.stopped, order.get(rank, 0))
            for rank, report in enumerate(reports)
        ]
        raise to_exception(ended, socket.gethostname(), logs, _oom_kills() - oom_kills)
    finally:
        shutil.rmtree(private, ignore_errors=True)


def _launch(private: Path, logs: Path, processes: int, max_restarts: int, watch: Watch) -> dict[int, int] | None:
    """Run torch's agent to the end. Returns None, or the exit codes by rank of the ranks that failed."""
    config: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": processes,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",  # port 0: the system chooses a free one, and the agent holds it
        "local_addr": "127.0.0.1",
        "max_restarts": max_restarts,
        "monitor_interval": 0.1,
        "logs_specs": _NoRedirection(log_dir=str(private)),
        "signals_to_handle": "SIGTERM,SIGHUP",  # SIGINT stays the notebook's KeyboardInterrupt
        "shutdown_timeout": SHUTDOWN_SECONDS,
    }
    known = {field.name for field in dataclasses.fields(LaunchConfig)}  # older releases lack the last two
    environment = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // processes)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK,  # a laptop's own name may not resolve
        # The agent's store keeps the keys of the attempt that failed, and gloo trips over them after a restart.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1" if max_restarts else "0",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", ""),
    }
    launch = elastic_launch(LaunchConfig(**{k: v for k, v in config.items() if k in known}), sys.executable)
    with _environment(environment), _signal_handlers_restored(), _quiet_agent():
        watch.start()
        try:
            launch("-u", WORKER_FILE, str(private))
            return None
        except ChildFailedError as error:
            return {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise
        finally:
            watch.stop()


class _NoRedirection(LogsSpecs):
    """Each rank redirects its own output: both streams into one file, where the agent would overwrite one."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nothing = dict.fromkeys(envs, "")
        errors = {rank: os.path.join(self.root_log_dir, f"agent{rank}.json") for rank in envs}
        return LogsDest(stdouts=nothing, stderrs=nothing, error_files=errors)

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def _value(rank: int, report: dict | None) -> Any:
    try:
        return pickle.loads((report or {})["value"])
    except Exception as error:
        raise WorkerError(
            f"rank {rank}'s value cannot be unpickled here ({error}): return numbers, tensors or plain containers."
        ) from error


def _log_folder(name: str) -> Path:
    """A new folder logs/NN-name under the run's folder; two jobs that start at once get one each."""
    root = places.this_run() / "logs"
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[:2]) for path in root.glob("[0-9][0-9]-*")), default=0)
    while True:
        folder = root / f"{number:02d}-{name}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
        number += 1


def _private_file(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck in this control group; 0 where that is not told."""
    try:
        events = Path("/sys/fs/cgroup/memory.events").read_text().split()
    except OSError:
        return 0
    return int(events[events.index("oom_kill") + 1]) if "oom_kill" in events else 0


@functools.cache
def _say_once(text: str) -> None:
    print(text)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """The agent replaces the kernel's handlers and leaves its own behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """The agent logs the same failure over ten lines; the exception tells it in one."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [log for log in map(logging.getLogger, names) if not log.disabled]
    for log in loggers:
        log.disabled = True
    try:
        yield
    finally:
        for log in loggers:
            log.disabled = False
