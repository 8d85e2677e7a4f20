"""Will this language model fit? Full fine-tuning, LoRA or QLoRA of any Transformers causal language model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from helpers.fit import advice, configs
from helpers.fit.answer import Cost, Fit
from helpers.fit.plan import Plan


def language_model(
    model: str,
    settings: Any,
    *,
    sequence: int,
    lora: int = 0,
    four_bit: bool = False,
    target_modules: str | Sequence[str] = "all-linear",
    optimizer: str = "adamw",
    precision: str = "bf16",
    checkpointing: bool = True,
    packing: bool = False,
    attention: str | None = None,
    full_depth: bool = False,
    strategy: str = "ddp",
    strategies: Sequence[str] = ("ddp", "fsdp2", "zero2", "zero3"),
    bucket_view: bool = False,
    tokens: float = 1e9,
    utilisation: float = 0.4,
    price: float | None = None,
) -> Fit:
    """Hold the fine-tuning of a Transformers causal language model against the cards.

    model: a name configs.known_models() lists, the path of a config.json (or its folder), or a hub id.
    settings: read for micro_batch, accumulation, gpus and hardware, as in fit.module.
    sequence: tokens per row of a micro-batch. packing: every row is full, so that no padding mask is made.
    lora: rank of the adapters, 0 for full fine-tuning. four_bit: QLoRA, the base in NF4 with double quantisation.
    optimizer: "adamw" (torch's fused, the Trainer's default), "adamw8bit" (bitsandbytes) or "adafactor" (torch).
    precision: "bf16" (everything), "mixed" (trained weights and state fp32, bf16 arithmetic) or "fp32".
    checkpointing: non-reentrant gradient checkpointing of every layer.
    attention: "sdpa", "eager" or "flash"; None takes sdpa where the architecture has it, else eager. "flash" traces
      the memory of fused attention for architectures that only reach it through GPU kernels (gpt-oss).
    full_depth: trace every layer; otherwise two shallow models are traced and extended, to the same result, faster.
    tokens: tokens to train on, epochs included; utilisation, price: for the lower bound on hours.
    Raises UnknownModel with the nearest names, ImpossibleCombination, UnknownCard: each names the value and the fix.
    """
    config = configs.load(model)
    how = (sequence, lora, four_bit, target_modules, optimizer, precision, checkpointing, packing, attention)
    plan = Plan(config, *how, full_depth=full_depth)
    job = plan.job(settings, bucket_view)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Transformers about names of its own
        return advice.answer(
            job,
            settings,
            strategy,
            strategies,
            title=f"{model}, {plan.describe()}",
            cost=Cost(*plan.flops(), tokens, "tokens", utilisation, price),
            changes=plan.dearer_changes(settings, bucket_view),
            notes=plan.notes(),
        )
