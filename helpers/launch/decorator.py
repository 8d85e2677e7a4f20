"""The @distributed decorator: one function, run on every rank, wherever the notebook happens to be."""

import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import local

PLACES = ("auto", "local", "databricks")
# The platform's package under its new and its old name. Its licence forbids bundling: imported only if present.
PLATFORM_MODULES = ("databricks.air", "serverless_gpu")


def distributed(
    gpus: int | None = None,
    gpu_type: str | None = None,
    remote: bool = False,
    timeout: float | None = None,
    *,
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    max_restarts: int = 0,
    on: str = "auto",
) -> Callable[[Callable[..., Any]], "Distributed"]:
    """Decorate a function so that `.distributed(...)` runs it on every rank and returns one value per global rank.

    The contract is that of Databricks' decorator of the same name, so a cell moves by its import line alone.

    gpus: processes to start, one per GPU; on a machine without any GPU that many CPU processes on gloo. None takes
        every visible GPU, or one CPU process. More than the visible GPUs is refused, never silently reduced.
    gpu_type: "H100", "A10", ...; chooses the hardware on Databricks, and is compared with it elsewhere.
    remote: run on machines other than the notebook's; Databricks only.
    timeout: seconds that the whole job may take; None is no limit. Past it WorkersStalled shows every rank's stack.
    num_accelerators, accelerator_type: the newer names of gpus and gpu_type; give either, not both.
    max_restarts: how often all ranks are started anew after a rank has failed; the function resumes from its newest
        checkpoint itself. Not offered by Databricks, and refused there.
    on: "local", "databricks", or "auto": in place inside a launched rank (RANK and WORLD_SIZE are set, as under
        torchrun or accelerate launch), through the platform on Databricks, else processes on this machine.

    A function that raises on a rank raises the same exception type here, with the rank and its traceback.
    """
    if callable(gpus):
        raise TypeError("@distributed needs parentheses: write @distributed() or @distributed(gpus=2).")
    job = Job(
        gpus=_one_of("gpus", gpus, "num_accelerators", num_accelerators),
        gpu_type=_one_of("gpu_type", gpu_type, "accelerator_type", accelerator_type),
        remote=remote,
        timeout=timeout,
        max_restarts=max_restarts,
        on=on,
    )
    return lambda function: Distributed(function, job)


@dataclass(frozen=True)
class Job:
    """What `distributed` was asked for, checked."""

    gpus: int | None
    gpu_type: str | None
    remote: bool
    timeout: float | None
    max_restarts: int
    on: str

    def __post_init__(self) -> None:
        if self.gpus is not None and (type(self.gpus) is not int or self.gpus < 1):
            raise ValueError(f"gpus={self.gpus!r} is not a number of processes: give a whole number of 1 or more.")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r} is not a time: give seconds above 0, or None for no limit.")
        if type(self.max_restarts) is not int or self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts!r}: give a whole number of 0 or more.")
        if self.on not in PLACES:
            raise ValueError(f"on={self.on!r} is unknown: choose {', '.join(map(repr, PLACES))}.")


class Distributed:
    """A function together with how many ranks it runs on. `.func` is the function itself, for one plain call."""

    def __init__(self, function: Callable[..., Any], job: Job) -> None:
        functools.update_wrapper(self, function)
        self.func = function
        self.job = job

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = _name(self.func)
        raise RuntimeError(
            f"{name} is decorated with @distributed, so {name}(...) alone is ambiguous: call {name}.distributed(...) "
            f"to run it on every rank, or {name}.func(...) to run it once, here."
        )

    def __repr__(self) -> str:
        return f"<{_name(self.func)}, distributed over {self.job.gpus or 'all'} GPUs>"

    def with_overrides(self, **changes: Any) -> "Distributed":
        """The same function with other arguments of @distributed, by either of their names."""
        for new, old in (("num_accelerators", "gpus"), ("accelerator_type", "gpu_type")):
            if new in changes:
                changes[old] = _one_of(old, changes.get(old), new, changes.pop(new))
        known = Job.__dataclass_fields__
        if unknown := [name for name in changes if name not in known]:
            raise TypeError(f"with_overrides has no argument {unknown[0]!r}: it takes {', '.join(known)}.")
        return Distributed(self.func, replace(self.job, **changes))

    def distributed(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run the function on every rank with these arguments and return one value per global rank.

        Arguments that do not fit the function raise TypeError here, before any process starts.
        """
        bound = inspect.signature(self.func).bind(*args, **kwargs)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return _run_in_place(self.func, bound, self.job)
        on_databricks = "DATABRICKS_RUNTIME_VERSION" in os.environ
        if self.job.on == "databricks" or (self.job.on == "auto" and on_databricks):
            return _run_on_databricks(self.func, bound, self.job)
        if self.job.remote:
            raise ValueError(
                "remote=True runs on Databricks' machines only: leave it out here, or pass on='databricks'."
            )
        return local.run(
            self.func,
            bound,
            processes=local.processes_for(self.job.gpus, self.job.gpu_type),
            timeout=self.job.timeout,
            max_restarts=self.job.max_restarts,
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _one_of(name: str, value: Any, other_name: str, other: Any) -> Any:
    if value is not None and other is not None:
        raise TypeError(f"{name}={value!r} and {other_name}={other!r} are two names of one argument: give one.")
    return value if other is None else other


def _run_in_place(function: Callable[..., Any], bound: inspect.BoundArguments, job: Job) -> list[Any]:
    """Run inside a rank that somebody else launched; every rank gets every rank's value, as after a launch."""
    import torch.distributed as dist

    world_size = int(os.environ["WORLD_SIZE"])
    if job.gpus is not None and job.gpus != world_size:
        raise ValueError(
            f"gpus={job.gpus} is asked for, but this process was launched as one of WORLD_SIZE={world_size} ranks: "
            f"launch {job.gpus} ranks, or pass gpus={world_size}; the global batch depends on it."
        )
    value = function(*bound.args, **bound.kwargs)
    if world_size == 1:
        return [value]
    joined_here = not dist.is_initialized()
    if joined_here:  # the function has left its process group, or never joined one
        dist.init_process_group("gloo")
    group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value, group)
    if joined_here:
        dist.destroy_process_group()
    return values


def _run_on_databricks(function: Callable[..., Any], bound: inspect.BoundArguments, job: Job) -> list[Any]:
    if job.max_restarts:
        raise ValueError(f"max_restarts={job.max_restarts}: Databricks does not restart ranks; pass max_restarts=0.")
    platform = _platform_decorator()
    return platform(**_platform_arguments(platform, job))(function).distributed(*bound.args, **bound.kwargs)


def _platform_decorator() -> Callable[..., Any]:
    for name in PLATFORM_MODULES:
        try:
            return importlib.import_module(name).distributed
        except ModuleNotFoundError as error:
            if not name.startswith(error.name or "\0"):  # present, but something that it needs is missing
                raise
    raise ModuleNotFoundError(
        f"on Databricks the ranks are started by the platform's package, and neither {' nor '.join(PLATFORM_MODULES)} "
        "is here: attach the notebook to serverless GPU compute, or pass on='local' to use this machine's GPUs."
    )


def _platform_arguments(platform: Callable[..., Any], job: Job) -> dict[str, Any]:
    """The job in the platform's own argument names: new images say num_accelerators, older ones gpus."""
    target = platform
    if platform.__module__.startswith("databricks.air"):  # its top-level name is a *args forwarder
        target = getattr(importlib.import_module("databricks.air.launcher"), "distributed", platform)
    known = inspect.signature(target).parameters
    count, kind = ("num_accelerators", "accelerator_type") if "num_accelerators" in known else ("gpus", "gpu_type")
    arguments = {count: job.gpus, kind: job.gpu_type, "remote": job.remote, "timeout": job.timeout}
    if "timeout" not in known:
        if job.timeout is not None:
            print("distributed: this Databricks image has no timeout for a job; timeout= is left out.")
        del arguments["timeout"]
    return {name: value for name, value in arguments.items() if value is not None or name == "timeout"}
