"""Where this process stands in the job: its rank, device and process group, and collectives that name who differs."""

import atexit
import functools
import hashlib
import os
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


class RankEnvironmentError(RuntimeError):
    """The variables that a launcher sets (RANK, WORLD_SIZE, ...) are incomplete or not numbers."""


class UnequalBatches(RuntimeError):
    """Ranks hold different numbers of batches; the one with more would wait for ever in a collective."""


class WeightsDiffer(RuntimeError):
    """Ranks ended with different weights: they trained alone, or some parameter was left out."""


class RankLate(RuntimeError):
    """A rank did not arrive at a barrier in time."""


@dataclass(frozen=True)
class Ranks:
    """One process's place in the job.

    rank: 0 ... world_size - 1 over all nodes; local_rank: the same within this node;
    device: where this rank's tensors belong; backend: "nccl" or "gloo".
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device} ({self.backend})"


def init(backend: str | None = None, *, timeout: timedelta = timedelta(minutes=10), seed: int = 0) -> Ranks:
    """Join this process to the job's process group, bind it to its device, seed it and share out the threads.

    Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them; without RANK the job has
    one rank. A process group that a framework (Ray, Lightning) has made already is kept.
    backend: "nccl" or "gloo"; None picks nccl when every rank of this node has a GPU of its own, else gloo.
    timeout: how long a collective may wait for a rank before it fails.
    seed: rank r draws from a stream of its own; rank 0's is that of a job of one process with the same seed.
    Raises RankEnvironmentError naming the variable and its value when one is missing or not a number.
    """
    place = (rank(), local_rank(), world_size())
    local_world_size = _variable("LOCAL_WORLD_SIZE", default=place[2])
    own_gpu = torch.cuda.is_available() and local_world_size <= torch.cuda.device_count()
    if dist.is_initialized():
        backend = dist.get_backend()
    elif backend is None:
        backend = "nccl" if own_gpu else "gloo"
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend={backend!r} is unknown: choose 'nccl' (GPUs) or 'gloo' (CPUs).")
    if backend == "nccl" and not own_gpu:
        raise ValueError(
            f"backend='nccl' needs a GPU for each of this node's {local_world_size} ranks, and torch sees "
            f"{torch.cuda.device_count()}: start fewer ranks or pass backend='gloo'."
        )
    device = torch.device("cuda", place[1]) if own_gpu else torch.device("cpu")
    if own_gpu:
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # the ranks of a node share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    if not dist.is_initialized():
        _join(backend, place, device, timeout)
    seed_everything(seed, place[0])
    return Ranks(place[0], place[1], place[2], device, backend)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy (where it is loaded) and torch from (seed, rank); a job's rank 0 gets the plain seed."""
    mixed = (seed + 1_000_003 * rank) % 2**32
    random.seed(mixed)
    torch.manual_seed(mixed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(mixed)


def rank() -> int:
    """This process's number in the whole job; 0 when there is no job."""
    return dist.get_rank() if dist.is_initialized() else _variable("RANK", default=0)


def world_size() -> int:
    """How many processes the job has; 1 when there is no job."""
    return dist.get_world_size() if dist.is_initialized() else _variable("WORLD_SIZE", default=1)


def local_rank() -> int:
    """This process's number on its own node, which is also the number of its GPU."""
    return _variable("LOCAL_RANK", default=0)


def on_rank_zero(function: Callable[P, T]) -> Callable[P, T | None]:
    """Decorator: run the function on rank 0 and return None on the others. It must not call a collective."""

    @functools.wraps(function)
    def only_zero(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if rank() == 0 else None

    return only_zero


def all_mean(value: float | torch.Tensor, weight: float = 1.0) -> float:
    """The mean of a number over all ranks, each counted with its weight (for instance its number of samples).

    A collective call: every rank must make it. Raises ValueError when the weights sum to zero.
    """
    total = torch.tensor([float(value) * weight, weight], dtype=torch.float64, device=_collective_device())
    if world_size() > 1:
        dist.all_reduce(total)
    summed, weights = total.tolist()
    if weights == 0:
        raise ValueError("all_mean: the weights of all ranks sum to 0, so there is nothing to average.")
    return summed / weights


def gather(value: Any) -> list[Any]:
    """Every rank's value, in the order of the ranks, on every rank. A collective call; the values are pickled."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier(purpose: str, timeout: timedelta = timedelta(minutes=10)) -> None:
    """Wait for every rank; raise RankLate naming the purpose and the missing ranks after `timeout`."""
    if world_size() == 1:
        return
    try:
        dist.monitored_barrier(_control_group(dist.group.WORLD), timeout=timeout, wait_all_ranks=True)
    except RuntimeError as error:
        raise RankLate(f"{purpose}: not every rank arrived within {timeout.total_seconds():g} s. {error}") from error


def equal_batches(loader: Iterable[Any]) -> int:
    """The number of batches that every rank's loader holds; to be called before epoch 0. A collective call.

    Raises UnequalBatches listing each rank's number, or TypeError for a loader without a length.
    """
    try:
        batches = len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise TypeError(
            f"equal_batches: {type(loader).__name__} has no length, so ranks cannot be compared before the epoch: "
            "give it a __len__ or a fixed number of steps per epoch."
        ) from error
    by_rank = gather(batches)
    if len(set(by_rank)) > 1:
        rows = "\n".join(f"  rank {number}: {count}" for number, count in enumerate(by_rank))
        raise UnequalBatches(
            f"ranks hold different numbers of batches:\n{rows}\nDistributedDataParallel would hang at the end of the "
            "epoch. Use DistributedSampler (it pads), drop_last=True, or shards of equal length."
        )
    return batches


def same_weights(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> str:
    """A hash of the model's parameters, after checking that every rank has the same. A collective call.

    Buffers are left out: running statistics of BatchNorm legitimately differ between the ranks of a step. Sharded
    parameters (DTensor) are compared by their full value. Wrapped or not, the hash is the same.
    Raises WeightsDiffer naming the first parameter that differs and each rank's hash of it.
    """
    tensors = model.named_parameters() if isinstance(model, torch.nn.Module) else model.items()
    hashes = {name.removeprefix("module."): _hash(tensor) for name, tensor in tensors}
    total = hashlib.blake2b("".join(f"{k}={v};" for k, v in sorted(hashes.items())).encode(), digest_size=8)
    everyone = gather(total.hexdigest())
    if len(set(everyone)) > 1:
        first, by_rank = _first_difference(gather(hashes))
        rows = "\n".join(f"  rank {number}: {value}" for number, value in enumerate(by_rank))
        raise WeightsDiffer(
            f"ranks hold different weights; the first that differs is {first!r}:\n{rows}\n"
            "Wrap the model in DistributedDataParallel before the first step, and call the wrapped model."
        )
    return everyone[0]


def shut_down() -> None:
    """Leave the process group if there is one. The launcher calls this when a rank's function has returned."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _join(backend: str, place: tuple[int, int, int], device: torch.device, timeout: timedelta) -> None:
    number, _, total = place
    binding: dict[str, Any] = {"device_id": device} if backend == "nccl" else {}
    if "RANK" in os.environ:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise RankEnvironmentError(f"RANK={number} is set but {name} is not: start with torchrun, or set it.")
        dist.init_process_group(backend, timeout=timeout, **binding)
    else:  # a job of one needs no port
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=total, timeout=timeout, **binding)
    atexit.register(shut_down)


def _variable(name: str, default: int) -> int:
    if name not in os.environ:
        if "RANK" in os.environ and name == "WORLD_SIZE":
            raise RankEnvironmentError(f"RANK={os.environ['RANK']} is set but {name} is not: start with torchrun.")
        return default
    try:
        return int(os.environ[name])
    except ValueError:
        raise RankEnvironmentError(f"{name}={os.environ[name]!r} is not a whole number.") from None


def _collective_device() -> torch.device:
    nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


@functools.lru_cache(maxsize=1)
def _control_group(world: Any) -> Any:
    # monitored_barrier, the only barrier that names the missing ranks, exists for gloo alone
    return world if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def _hash(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy(), digest_size=8).hexdigest()  # type: ignore[arg-type]


def _first_difference(hashes: list[dict[str, str]]) -> tuple[str, list[str]]:
    names = sorted({name for each in hashes for name in each})
    for name in names:
        by_rank = [each.get(name, "missing") for each in hashes]
        if len(set(by_rank)) > 1:
            return name, by_rank
    raise AssertionError("the hashes of all parameters agree")
