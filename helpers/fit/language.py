"""Will this language model fit? Its shape from a small file, a config.json or the hub; full, LoRA or QLoRA."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from helpers.fit import advice, cards
from helpers.fit.answer import Cost, Fit
from helpers.fit.plan import Plan

SHAPES = Path(__file__).parent / "shapes"


class UnknownModel(ValueError):
    """The model is neither a known name, nor a config.json, nor a hub id that can be reached."""


def known_models() -> list[str]:
    return sorted(path.stem for path in SHAPES.glob("*.json"))


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

    model: a name known_models() lists, the path of a config.json (or its folder), or a hub id.
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
    config = load_config(model)
    plan = Plan(
        load_config(model),
        sequence,
        lora,
        four_bit,
        target_modules,
        optimizer,
        precision,
        checkpointing,
        packing,
        attention,
        full_depth,
    )
    job = plan.job(settings, bucket_view)
    card = cards.of_settings(settings)
    found = advice.estimates_for(job, strategy, strategies)
    return Fit(
        title=f"{model}, {plan.describe()}",
        strategy=strategy,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        gpus=job.gpus,
        card=card,
        estimates=found,
        advice=advice.advise(job, strategy, found, card, plan.dearer_changes(settings, bucket_view)),
        cost=Cost(*plan.flops(), tokens, "tokens", utilisation, price),
        notes=plan.notes(),
    )


def load_config(model: str) -> Any:
    """The Transformers config of a known name, a local config.json or its folder, or a hub id."""
    from transformers import AutoConfig

    local = Path(model).expanduser()
    path = local / "config.json" if local.is_dir() else local
    if not path.is_file():
        path = SHAPES / f"{model.lower().split('/')[-1]}.json"
    if path.is_file():
        values = json.loads(path.read_text())
        kind = values.pop("model_type", None)
        if kind is None:
            raise UnknownModel(f"{path} has no model_type, so it is not the config of a Transformers model.")
        return AutoConfig.for_model(
            kind, **{k: v for k, v in values.items() if k not in ("source", "auto_map")}
        )
    near = difflib.get_close_matches(model.lower(), known_models(), n=3, cutoff=0.4)
    advice_text = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(known_models())}."
    if model.count("/") != 1 or local.suffix:
        raise UnknownModel(
            f"The model {model!r} is unknown. {advice_text} A config.json or a hub id does as well."
        )
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise UnknownModel(
            f"The hub gave no config for {model!r}: {str(error).splitlines()[0]} {advice_text}"
        ) from error
