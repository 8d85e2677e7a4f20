"""What the README tells a reader to type or paste does what it says."""

import re
from collections.abc import Callable
from typing import Any

from conftest import REPOSITORY

README = (REPOSITORY / "README.md").read_text()


def test_the_example_runs_as_it_stands_and_learns(script: Callable[..., Any]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = script(example)
    assert done.returncode == 0, done.stderr
    first, second = map(float, re.findall(r"\[(\S+), (\S+)\]", done.stdout)[0])
    assert first == second < 0.1, done.stdout


def test_every_file_and_command_that_it_names_exists() -> None:
    for path in re.findall(r"\]\(([\w/.]+)\)", README):
        assert (REPOSITORY / path).exists(), path
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"\bmake (run|test|lab|env|\w+ NAME)\b", README)):
        assert f"\n{target.split()[0]}:" in makefile, target
