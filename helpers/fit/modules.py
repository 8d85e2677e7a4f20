"""Will this module fit? Any torch nn.Module with its batch, loss and optimizer; torch is all it needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from helpers import memory
from helpers.fit import advice
from helpers.fit.answer import Cost, Fit
from helpers.fit.strategies import Job


@dataclass(frozen=True)
class Batch:
    """The part of a recipe's settings that memory depends on, for use without settings."""

    micro_batch: int
    gpus: int
    accumulation: int = 1
    hardware: str = ""


def module(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss_fn: memory.LossFunction,
    settings: Any,
    *,
    optimizer: memory.OptimizerFunction,
    title: str = "",
    strategy: str = "ddp",
    strategies: Sequence[str] = ("ddp", "fsdp2", "zero2", "zero3"),
    precision: str = "fp32",
    bucket_view: bool = False,
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    samples: float = 1e6,
    utilisation: float = 0.4,
    price: float | None = None,
) -> Fit:
    """Hold the training job of any torch module against the cards.

    build_model, make_batch, loss_fn, optimizer: as memory.trace takes them: no arguments; the number of samples;
      the model and a batch; the trainable parameters.
    settings: the object that trains, read for micro_batch, accumulation, gpus and hardware ("8xH100"); or a Batch.
    precision: "fp32"; "bf16" (all in bf16); "mixed" (fp32 weights and state, bf16 autocast).
    bucket_view: DDP is built with gradient_as_bucket_view=True.
    blocks: the submodules FSDP2 gathers one at a time; the members of ModuleLists, or the children, unless given.
    samples: how many samples will be trained on, epochs included; utilisation, price: for the lower bound on hours.
    Raises ImpossibleCombination, UnknownCard or memory.CannotTrace, each naming the value and the fix.
    """
    with torch.device("meta"):
        multiplied = multiplied_parameters(build_model())

    def build(dtype: torch.dtype) -> nn.Module:
        model = build_model()
        return model if dtype == torch.float32 else model.to(dtype)

    job = Job(
        build,
        make_batch,
        loss_fn,
        optimizer,
        micro_batch=settings.micro_batch,
        gpus=settings.gpus,
        accumulation=settings.accumulation,
        precision=precision,
        blocks=blocks,
        bucket_view=bucket_view,
    )
    return advice.answer(
        job,
        settings,
        strategy,
        strategies,
        title=title or f"{settings.hardware or 'a plain module'}, {precision}",
        cost=Cost(6 * multiplied, "6 flop per parameter and sample", samples, "samples", utilisation, price),
    )


def multiplied_parameters(model: nn.Module, share: Callable[[str], float] = lambda name: 1.0) -> int:
    """The N of 6ND: parameters that are multiplied with activations, without the tables that are only looked up.

    share: share(parameter_name) is the part of that parameter a token meets (experts of a mixture: top_k / experts).
    """
    counted = {
        id(parameter): share(f"{prefix}.{name}") * parameter.numel()
        for prefix, part in model.named_modules()
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag)
        for name, parameter in part.named_parameters(recurse=False)
    }
    return round(sum(counted.values()))
