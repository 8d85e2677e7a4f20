"""`python -m helpers.fit`: will this language model fit on those cards? What `gallery fit` runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from helpers.fit import Batch, ImpossibleCombination, UnknownCard, UnknownModel, cards, language_model
from helpers.fit.plan import ATTENTIONS, OPTIMIZERS
from helpers.fit.strategies import PRECISIONS, STRATEGIES


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer. Exit codes: 0 it fits, 1 it does not, 2 the question is not possible (reason on stderr)."""
    asked = _parser().parse_args(arguments)
    try:
        gpus, _ = cards.parse(asked.gpus)
        answer = language_model(
            asked.model,
            Batch(asked.micro_batch, gpus, _accumulation(asked, gpus), asked.gpus),
            sequence=asked.sequence,
            lora=asked.lora,
            four_bit=asked.four_bit,
            optimizer=asked.optimizer,
            precision=asked.precision,
            checkpointing=not asked.no_checkpointing,
            packing=asked.packing,
            attention=asked.attention,
            full_depth=asked.full_depth,
            strategy=asked.strategy,
            bucket_view=asked.bucket_view,
            tokens=asked.tokens,
            utilisation=asked.utilisation,
            price=asked.price,
        )
    except (UnknownModel, UnknownCard, ImpossibleCombination) as error:
        print(f"gallery fit: {error}", file=sys.stderr)
        return 2
    if asked.plot:
        answer.plot().savefig(asked.plot, dpi=150)
    print(json.dumps({"fits": answer.fits, "rows": answer.rows()}, indent=2) if asked.json else answer)
    return 0 if answer.fits else 1


def _accumulation(asked: argparse.Namespace, gpus: int) -> int:
    if asked.global_batch is None:
        return asked.accumulation
    at_once = asked.micro_batch * gpus
    if asked.global_batch % at_once:
        lower = max(asked.global_batch // at_once, 1) * at_once
        raise ImpossibleCombination(
            f"--global-batch {asked.global_batch} is no multiple of micro-batch {asked.micro_batch} x {gpus} GPUs = "
            f"{at_once}: use {lower} or {lower + at_once}, or another micro-batch."
        )
    return asked.global_batch // at_once


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("gallery fit", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a known name, a config.json (or its folder) or a hub id")
    add("--gpus", default="8xH100", help=f"count x card, the card one of {', '.join(cards.CARDS)}")
    add("--strategy", default="ddp", help=", ".join(STRATEGIES))
    add("--sequence", type=int, default=2048, help="tokens per row")
    add("--micro-batch", type=int, default=1, help="rows per GPU and forward pass")
    add("--accumulation", type=int, default=1, help="micro-batches per optimiser step")
    add("--global-batch", type=int, help="rows per optimiser step on all GPUs; sets --accumulation")
    add("--lora", type=int, default=0, help="rank of the adapters; 0 is full fine-tuning")
    add("--four-bit", action="store_true", help="QLoRA: the frozen base in 4 bits")
    add("--optimizer", default="adamw", help=", ".join(OPTIMIZERS))
    add("--precision", default="bf16", help=", ".join(PRECISIONS))
    add("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    add("--packing", action="store_true", help="rows are full: no padding mask")
    add("--attention", help=", ".join(ATTENTIONS))
    add("--bucket-view", action="store_true", help="DDP with gradient_as_bucket_view=True")
    add("--full-depth", action="store_true", help="trace every layer: slower, the same numbers")
    add("--tokens", type=float, default=1e9, help="tokens to train on, for the lower bound on hours")
    add("--utilisation", type=float, default=0.4, help="assumed share of the cards' bf16 peak")
    add("--price", type=float, help="per GPU-hour, in any currency")
    add("--plot", metavar="FILE", help="save the picture")
    add("--json", action="store_true", help="print the table as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
