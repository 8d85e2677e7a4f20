"""What one rank needs under DDP, FSDP2, ZeRO-2 and ZeRO-3, from traces of one rank's training step.

DDP and FSDP2 are traced; FSDP2 as fully_shard under torch's fake process group, at the true world size. ZeRO cannot
be traced (DeepSpeed allocates outside of torch's operators), so the traced categories are divided by formula:
  stage 2 divides gradients and optimizer state by the world size, stage 3 the weights too (Rajbhandari et al.,
  "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 5);
  below fp32, DeepSpeed keeps an fp32 master copy of trained weights with fp32 state, divided likewise (same paper,
  section 3), and at the step an fp32 copy of this rank's share of the gradients;
  buffers are DeepSpeed's documented defaults: reduce_bucket_size and allgather_bucket_size 5e8 elements,
  stage3_max_live_parameters 1e9, stage3_prefetch_bucket_size 5e7, each at most what the model has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from helpers import memory
from helpers.fit import cards, depth
from helpers.fit.vocabulary import PRECISIONS, STRATEGIES, ImpossibleCombination, one_of

PARTS = (*memory.CATEGORIES, "allowance")
_BUCKET, _LIVE, _PREFETCH = int(5e8), int(1e9), int(5e7)


@dataclass(frozen=True)
class Job:
    """One training job, as every strategy sees it: how to build its parts, whatever the strategy.

    build: build(dtype) gives the model with trained weights in that dtype.
    precision: "fp32" or "bf16" for everything, or "mixed": fp32 weights and optimizer state, bf16 arithmetic.
    blocks: the submodules that FSDP2 gathers one at a time.
    bucket_view: DDP's gradient_as_bucket_view: gradients live in the buckets instead of beside them.
    depth: how many alike blocks the model has; build(dtype, depth=n) then makes one with n of them, and two shallow
      models are traced instead of the whole one (helpers.fit.depth): with `shallow` blocks and with one more.
    fsdp2_fault: why the job cannot run under FSDP2, "" if it can.
    state_follows: the optimizer's state has the dtype of the weights (AdamW), not one of its own (8-bit AdamW).
    """

    build: Callable[..., nn.Module]
    make_batch: Callable[[int], Any]
    loss_fn: memory.LossFunction
    optimizer: memory.OptimizerFunction
    micro_batch: int
    gpus: int
    accumulation: int = 1
    precision: str = "fp32"
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    bucket_view: bool = False
    state_follows: bool = True
    depth: int | None = None
    shallow: int = 2
    fsdp2_fault: str = ""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ImpossibleCombination(f"precision={self.precision!r} is unknown: choose {', '.join(PRECISIONS)}.")
        for name in ("micro_batch", "gpus", "accumulation"):
            if getattr(self, name) < 1:
                raise ImpossibleCombination(f"{name}={getattr(self, name)} must be 1 or more.")


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank under one strategy, as a function of the micro-batch.

    points: the same moments of the step (forward, backward, step ...) traced at several micro-batch sizes. Between
    them memory is taken as linear, which errs on the safe side: the peak is the highest of many lines, so convex.
    """

    strategy: str
    micro_batch: int
    points: Mapping[int, Mapping[str, Mapping[str, int]]] = field(repr=False)
    source: str

    def parts(self, micro_batch: int | None = None) -> dict[str, int]:
        """Bytes by part (the keys are PARTS) at the peak."""
        size = micro_batch or self.micro_batch
        sizes = sorted(self.points)
        small, large = next(((a, b) for a, b in pairwise(sizes) if size <= b), (sizes[-2], sizes[-1]))
        low, high = self.points[small], self.points[large]
        share = (size - small) / (large - small)
        at = [{k: round(v + share * (high[m][k] - v)) for k, v in low[m].items()} for m in low if m in high]
        return max(at, key=lambda parts: sum(parts.values()))

    def total(self, micro_batch: int | None = None) -> int:
        return sum(self.parts(micro_batch).values())

    def fits(self, card: cards.Card, micro_batch: int | None = None) -> bool:
        return self.total(micro_batch) <= cards.TIGHT * card.bytes

    def largest_micro_batch(self, card: cards.Card, at_most: int = 1 << 31) -> int:
        """The largest micro-batch that fits on this card, 0 if none does."""
        low, high = 0, at_most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(card, middle) else (low, middle)
        return low


def estimate(job: Job, strategy: str) -> Estimate:
    """Trace the job (seconds) and account for the strategy. Raises ImpossibleCombination for an unknown strategy."""
    return estimates(job, [strategy])[strategy]


def estimates(job: Job, strategies: Sequence[str] = tuple(STRATEGIES)) -> dict[str, Estimate]:
    """One Estimate per strategy name; what two strategies share is traced once."""
    for name in strategies:
        one_of("strategy", name, STRATEGIES)
    traces: dict[torch.dtype, list[memory.Peak]] = {}
    found = {}
    for name in strategies:
        if name == "fsdp2":
            peaks = _trace_fsdp2(job)
            changed = [{moment: dict(parts) for moment, parts in peak.moments.items()} for peak in peaks]
        else:
            dtype = torch.bfloat16 if job.precision == "mixed" and name != "ddp" else _weights_dtype(job)
            if dtype not in traces:
                traces[dtype] = _trace_plain(job, dtype)
            peaks = traces[dtype]
            change = _ddp if name == "ddp" else _zero
            changed = [change(job, peak, name) for peak in peaks]
        spare = cards.allowance(job.gpus)
        points = {
            peak.micro_batch: {m: {**parts, "allowance": spare} for m, parts in moments.items()}
            for peak, moments in zip(peaks, changed, strict=True)
        }
        source = "traced" if name in ("ddp", "fsdp2") else "traced, then divided by formula"
        found[name] = Estimate(name, job.micro_batch, points, source)
    return found


def _weights_dtype(job: Job) -> torch.dtype:
    return torch.bfloat16 if job.precision == "bf16" else torch.float32


def _trace_plain(job: Job, dtype: torch.dtype) -> list[memory.Peak]:
    autocast = torch.bfloat16 if job.precision == "mixed" and dtype == torch.float32 else None
    return _trace(job, dtype, autocast=autocast, keep_gradients=job.bucket_view and job.gpus > 1)


def _trace(job: Job, dtype: torch.dtype, **options: Any) -> list[memory.Peak]:
    times = (1, 8) if job.depth else (1, 8, 128)
    rest = (job.make_batch, job.loss_fn, [n * job.micro_batch for n in times])
    options |= {"optimizer": job.optimizer, "accumulation": job.accumulation}
    if job.depth is None:
        return memory.trace_each(lambda: job.build(dtype), *rest, **options)
    return depth.trace_each(lambda blocks: job.build(dtype, depth=blocks), job.shallow, job.depth, *rest, **options)


def _ddp(job: Job, peak: memory.Peak, name: str) -> dict[str, dict[str, int]]:
    # The reducer copies every gradient into flat buckets, which it keeps from the first step on.
    buckets = 0 if job.gpus == 1 or job.bucket_view else peak.moments["step//peak"]["gradients"]
    return {m: {**parts, "communication": parts["communication"] + buckets} for m, parts in peak.moments.items()}


def _zero(job: Job, peak: memory.Peak, name: str) -> dict[str, dict[str, int]]:
    low, width = job.precision != "fp32", 4 if job.precision == "fp32" else 2
    divided = ("gradients", "optimizer") + (("weights", "adapters") if name == "zero3" else ())
    if name == "zero3":
        buffers = min(_BUCKET, peak.trainable) + min(_LIVE + _PREFETCH, peak.parameters)
    else:
        buffers = 2 * min(_BUCKET, peak.trainable)
    changed = {}
    for moment, traced in peak.moments.items():
        parts = dict(traced)
        if low:
            parts["optimizer"] = parts["optimizer"] * (2 if job.state_follows else 1) + 4 * peak.trainable
            if moment.startswith("step"):
                parts["temporary"] += 4 * peak.trainable // job.gpus
        for category in divided:
            parts[category] = -(-parts[category] // job.gpus)
        parts["communication"] += buffers * width if job.gpus > 1 else 0
        changed[moment] = parts
    return changed


def _trace_fsdp2(job: Job) -> list[memory.Peak]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if job.precision == "mixed":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with _fake_world(job.gpus) as mesh:

        def shard(model: nn.Module) -> nn.Module:
            for block in (job.blocks or depth.blocks)(model):
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            return model

        return _trace(job, _weights_dtype(job), wrap=shard)


@contextlib.contextmanager
def _fake_world(gpus: int) -> Iterator[Any]:
    """A process group of this world size in which collectives do nothing, gone at the end."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("FSDP2 is traced in a process group of its own: call this in the parent, before launch.")
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        yield dist.init_device_mesh("cpu", (gpus,))
    finally:
        dist.destroy_process_group()
