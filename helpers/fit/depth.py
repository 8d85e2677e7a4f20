"""Trace a model of many alike blocks at two small depths and extend each moment of the step to the full depth.

At a given place (before, in the first block, in the last, in the head) of a given phase, the live bytes are linear
in the number of blocks: each block adds its weights, gradients, optimizer state and saved activations. In the blocks
between, they lie between those of the first and the last. So two depths determine the peak at any depth exactly, in
a fraction of the time; tests compare it with a trace of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from helpers import memory


def trace_each(
    build_model: Callable[[int], nn.Module],
    shallow: int,
    depth: int,
    make_batch: Callable[[int], Any],
    loss_fn: memory.LossFunction,
    micro_batches: Sequence[int],
    **options: Any,
) -> list[memory.Peak]:
    """As memory.trace_each for build_model(depth), from traces of `shallow` blocks (two or more) and one more."""
    traces = [
        memory.trace_each(partial(build_model, d), make_batch, loss_fn, micro_batches, blocks=blocks, **options)
        for d in ((shallow, shallow + 1) if depth > shallow + 1 else (depth,))
    ]
    if len(traces) == 1:
        return traces[0]
    return [_extend(low, high, depth - shallow) for low, high in zip(*traces, strict=True)]


def _extend(low: memory.Peak, high: memory.Peak, more: int) -> memory.Peak:
    """The peak with so many more blocks than `low`, when `high` has one more."""

    def at(small: int, large: int) -> int:
        return small + (large - small) * more

    moments = {
        moment: {part: at(size, high.moments[moment][part]) for part, size in parts.items()}
        for moment, parts in low.moments.items()
        if "/middle/" not in moment
    }
    return memory.Peak(
        moments=moments,
        micro_batch=low.micro_batch,
        parameters=at(low.parameters, high.parameters),
        trainable=at(low.trainable, high.trainable),
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The members of the model's ModuleLists, or else its children: what runs, and what FSDP2 gathers, one by one."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    members = [block for each in lists for block in each] or list(model.children())
    nested = {id(inner) for block in members for inner in block.modules() if inner is not block}
    return [b for b in members if id(b) not in nested and any(True for _ in b.parameters())]
