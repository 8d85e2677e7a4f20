"""`gallery fit`: will a language model fit? Checked here, answered by the planner in an environment with torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from helpers.fit import options
from helpers.fit.vocabulary import ImpossibleCombination, UnknownCard, UnknownModel
from helpers.runner import environments
from helpers.runner.errors import BadInput

ENVIRONMENT = "fit"  # torch, transformers, peft and matplotlib


def run(base: Path, arguments: Sequence[str], say: Callable[[str], None]) -> int:
    """Run the planner with these options in its environment, made first if need be; returns its exit code.

    0: it fits, 1: it does not, 2: the question is not possible. Raises BadInput for a slip in the options, before
    any environment is made.
    """
    try:
        options.read(arguments)
    except (UnknownModel, UnknownCard, ImpossibleCombination) as error:
        raise BadInput(str(error)) from None
    python = environments.make(base, ENVIRONMENT, say)
    return subprocess.run([str(python), "-m", "helpers.fit", *arguments], check=False).returncode
