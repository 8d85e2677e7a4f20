"""What can go wrong before a kernel starts, and the exit codes of `gallery`."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

OK = 0
NOTEBOOK_FAILED = 1  # a cell raised, the kernel died, or the time limit ended it
BAD_INPUT = 2  # nothing was started
CLAIM_FAILED = 3  # every cell ran, but a recorded claim does not hold, or nothing was recorded
INTERRUPTED = 130  # Ctrl-C; 143 after SIGTERM


class BadInput(Exception):
    """What was asked for cannot be started; the message says what was given, what is allowed, what to do."""


class BuildFailed(Exception):
    """An environment could not be made; the message says which step failed and what it said."""


def unknown(kind: str, given: str, known: Iterable[str]) -> BadInput:
    """An error for a misspelt name, with the nearest right one and all that are known."""
    options = list(known)
    # one number is not a misspelling of another
    near = [] if given.isdecimal() else get_close_matches(given, options, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return BadInput(f"{kind} {given!r} is unknown.{hint} Known: {', '.join(options) or 'none'}.")
