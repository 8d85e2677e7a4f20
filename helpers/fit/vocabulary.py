"""The words the planner understands and the errors it raises for others; importing this needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

STRATEGIES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
PRECISIONS = ("fp32", "bf16", "mixed")
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor")
ATTENTIONS = ("sdpa", "eager", "flash")


class ImpossibleCombination(ValueError):
    """The settings contradict each other or one is not allowed; the message says which and what to change."""


class UnknownCard(ValueError):
    """The card or hardware text names nothing that is known here."""


class UnknownModel(ValueError):
    """The model is neither a known name, nor a config.json, nor a hub id that can be reached."""


def one_of(name: str, value: str, allowed: Iterable[str]) -> str:
    """The value, if it is allowed; else ImpossibleCombination naming the choices and the nearest."""
    choices = list(allowed)
    if value in choices:
        return value
    near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise ImpossibleCombination(f"{name}={value!r} is unknown: choose {', '.join(choices)}.{hint}")
