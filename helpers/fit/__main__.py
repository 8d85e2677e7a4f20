"""`python -m helpers.fit`: will this language model fit on those cards? What `gallery fit` runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from helpers.fit import options
from helpers.fit.vocabulary import ImpossibleCombination, UnknownCard, UnknownModel


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the answer. Exit codes: 0 it fits, 1 it does not, 2 the question is not possible (reason on stderr)."""
    try:
        asked = options.read(arguments)
        from helpers import fit

        answer = fit.language_model(
            asked.model,
            fit.Batch(asked.micro_batch, asked.count, asked.accumulation, asked.gpus),
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


if __name__ == "__main__":
    sys.exit(main())
