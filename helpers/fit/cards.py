"""The cards a job is held against: memory as torch reports it, peak bf16 arithmetic, and what CUDA and NCCL take."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from helpers.fit.vocabulary import UnknownCard

GIB = 2**30

# Memory that is on the card but that no tensor of the training step owns. Stated, not measured.
CUDA_CONTEXT = int(0.75 * GIB)  # context, loaded kernels, cuBLAS work space: 0.5 to 0.9 GiB from A10 to H200
NCCL_BUFFERS = int(0.75 * GIB)  # communicator and channel buffers of one process group of 8 ranks
TIGHT = 0.95  # what a job may take of a card: the rest is left to the fragmentation of the caching allocator


@dataclass(frozen=True)
class Card:
    """memory: GiB as torch.cuda reports it (less than the label says); tflops: dense bf16 peak of the data sheet."""

    name: str
    memory: float
    tflops: float

    @property
    def bytes(self) -> int:
        return int(self.memory * GIB)


CARDS = {
    card.name: card
    for card in (
        Card("A10", 22.0, 125),
        Card("A100-40", 39.4, 312),
        Card("A100-80", 79.2, 312),
        Card("H100", 79.1, 989),
        Card("H200", 139.8, 989),
        Card("B200", 178.3, 2250),
    )
}


def card(name: str) -> Card:
    """The card of this name, in any spelling of case. Raises UnknownCard naming the nearest ones."""
    known = {key.lower(): key for key in CARDS}
    key = name.strip().lower().removeprefix("nvidia ").replace("_", "-").replace(" ", "-").removesuffix("gb")
    key = {"a100-sxm": "a100", "a10g": "a10", "a10-24": "a10", "h100-80": "h100", "h200-141": "h200"}.get(key, key)
    if key in known:
        return CARDS[known[key]]
    if key == "a100":
        raise UnknownCard("The card 'A100' comes with 40 and with 80 GB: say A100-40 or A100-80.")
    near = difflib.get_close_matches(key, known, n=2, cutoff=0.4)
    hint = f" Did you mean {' or '.join(known[n] for n in near)}?" if near else ""
    raise UnknownCard(f"The card {name!r} is unknown: choose from {', '.join(CARDS)}.{hint}")


def parse(hardware: str) -> tuple[int, Card]:
    """(count, card) of a text such as "8xH100", or "2x8xA10" for two nodes of eight: 16 cards.

    Raises UnknownCard when the text or the card is not understood.
    """
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*×]\s*)?(\d+)\s*[xX*×]\s*(.+?)\s*", hardware)
    count = int(match[1] or 1) * int(match[2]) if match else 0
    if not match or count < 1:
        raise UnknownCard(f"The hardware {hardware!r} is not understood: write count x card, such as 8xH100.")
    return count, card(match[3])


def allowance(gpus: int) -> int:
    """Bytes set aside on each card for the CUDA context and, with more than one GPU, for NCCL."""
    return CUDA_CONTEXT + (NCCL_BUFFERS if gpus > 1 else 0)


def of_settings(settings: object) -> Card | None:
    """The card a recipe's settings name in `hardware`, None for text that is no count x card ("2 CPU processes").

    Raises UnknownCard when the count and settings.gpus disagree, since then one of them is wrong.
    """
    hardware = str(getattr(settings, "hardware", ""))
    try:
        count, found = parse(hardware)
    except UnknownCard:
        return None
    if count != settings.gpus:  # type: ignore[attr-defined]
        raise UnknownCard(f"hardware={hardware!r} has {count} cards but gpus={settings.gpus}: make them agree.")  # type: ignore[attr-defined]
    return found
