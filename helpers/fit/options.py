"""The options of `gallery fit`, and the checks that need no torch, so that a slip costs no start of an environment."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from helpers.fit import cards, configs
from helpers.fit.vocabulary import ATTENTIONS, OPTIMIZERS, PRECISIONS, STRATEGIES, ImpossibleCombination, one_of


def read(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, with `count` (GPUs) and `accumulation` worked out.

    Raises UnknownModel, UnknownCard or ImpossibleCombination; exits with code 2 on an unknown option.
    """
    asked = _parser().parse_args(arguments)
    configs.find(asked.model)
    asked.count, _ = cards.parse(asked.gpus)
    one_of("--strategy", asked.strategy, STRATEGIES)
    one_of("--optimizer", asked.optimizer, OPTIMIZERS)
    one_of("--precision", asked.precision, PRECISIONS)
    if asked.attention is not None:
        one_of("--attention", asked.attention, ATTENTIONS)
    for name in ("micro_batch", "accumulation", "sequence"):
        if getattr(asked, name) < 1:
            raise ImpossibleCombination(f"--{name.replace('_', '-')} {getattr(asked, name)} must be 1 or more.")
    if not 0 < asked.utilisation <= 1:
        raise ImpossibleCombination(f"--utilisation {asked.utilisation} must be above 0 and at most 1, such as 0.4.")
    if asked.global_batch is not None:
        at_once = asked.micro_batch * asked.count
        if asked.global_batch < 1 or asked.global_batch % at_once:
            lower = max(asked.global_batch // at_once, 1) * at_once
            raise ImpossibleCombination(
                f"--global-batch {asked.global_batch} is no multiple of micro-batch {asked.micro_batch} x "
                f"{asked.count} GPUs = {at_once}: use {lower} or {lower + at_once}, or another micro-batch."
            )
        asked.accumulation = asked.global_batch // at_once
    return asked


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gallery fit", description="Will this language model fit on those cards?")
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(configs.known_models())}, a config.json, its folder or a hub id")
    add("--gpus", default="8xH100", help=f"count x card, the card one of {', '.join(cards.CARDS)} (default 8xH100)")
    add("--strategy", default="ddp", help=f"{', '.join(STRATEGIES)} (default ddp)")
    add("--sequence", type=int, default=2048, help="tokens per row (default 2048)")
    add("--micro-batch", type=int, default=1, help="rows per GPU and forward pass (default 1)")
    add("--accumulation", type=int, default=1, help="micro-batches per optimizer step (default 1)")
    add("--global-batch", type=int, help="rows per optimizer step on all GPUs; works out the accumulation")
    add("--lora", type=int, default=0, metavar="RANK", help="rank of the adapters; without it full fine-tuning")
    add("--four-bit", action="store_true", help="QLoRA: the frozen base in 4 bits")
    add("--optimizer", default="adamw", help=f"{', '.join(OPTIMIZERS)} (default adamw)")
    add("--precision", default="bf16", help=f"{', '.join(PRECISIONS)} (default bf16)")
    add("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    add("--packing", action="store_true", help="rows are full: no padding mask")
    add("--attention", help=f"{', '.join(ATTENTIONS)} (default: sdpa where the model has it)")
    add("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True")
    add("--full-depth", action="store_true", help="trace every layer: slower, the same numbers")
    add("--tokens", type=float, default=1e9, help="tokens to train on, for the lower bound on hours (default 1e9)")
    add("--utilisation", type=float, default=0.4, help="assumed share of the cards' bf16 peak (default 0.4)")
    add("--price", type=float, help="per GPU-hour, in any currency")
    add("--plot", metavar="FILE", help="save the picture")
    add("--json", action="store_true", help="print the table as JSON")
    return parser
