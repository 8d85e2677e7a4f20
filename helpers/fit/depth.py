"""Trace a model of many alike blocks at two small depths and extend each moment of the step to the full depth.

At a given place (before, in the first block, in the last, in the head) of a given phase, the live bytes are linear
in the number of blocks: each block adds its weights, gradients, optimiser state and saved activations. In the blocks
between, they lie between those of the first and the last. So two depths determine the peak at any depth exactly, in
a fraction of the time; tests compare it with a trace of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from helpers import memory

SHALLOW = (3, 5)  # three: a first, a last and one between, so that FSDP2 has something to prefetch


def trace_each(
    build_model: Callable[[int], nn.Module],
    depth: int,
    make_batch: Callable[[int], Any],
    loss_fn: memory.LossFunction,
    micro_batches: Sequence[int],
    **options: Any,
) -> list[memory.Peak]:
    """As memory.trace_each, for build_model(depth); all blocks are traced when there are no more than a few."""
    traces = [
        memory.trace_each(
            lambda d=d: build_model(d), make_batch, loss_fn, micro_batches, blocks=blocks, **options
        )
        for d in (SHALLOW if depth > SHALLOW[-1] else (depth,))
    ]
    if len(traces) == 1:
        return traces[0]
    return [extend(low, high, depth) for low, high in zip(*traces, strict=True)]


def extend(low: memory.Peak, high: memory.Peak, depth: int) -> memory.Peak:
    """The peak at this depth from those at the depths SHALLOW."""

    def at(small: int, large: int) -> int:
        return small + (large - small) * (depth - SHALLOW[0]) // (SHALLOW[1] - SHALLOW[0])

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
