"""The recipes, read from the notebooks themselves: their metadata says what each one is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import nbformat

from helpers.runner.errors import BadInput, unknown

REQUIRED = ("title", "summary", "environment", "framework", "task", "strategy", "profiles")


@dataclass(frozen=True)
class Profile:
    """One size of a recipe: hardware in words, expected minutes, and whether it ever ran there."""

    name: str
    hardware: str
    minutes: float
    ran: bool


@dataclass(frozen=True)
class Recipe:
    """A notebook of the gallery with what its metadata says; `number` is "01", `name` the file's stem."""

    path: Path
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name.split("_")[0]

    @property
    def title(self) -> str:
        return str(self.metadata["title"])

    @property
    def environment(self) -> str:
        return str(self.metadata["environment"])

    @cached_property
    def profiles(self) -> dict[str, Profile]:
        """By name, the quickest first: notebooks are saved with their keys in alphabetical order."""
        found = [
            Profile(name, str(facts["hardware"]), float(facts["minutes"]), bool(facts["ran"]))
            for name, facts in self.metadata["profiles"].items()
        ]
        return {profile.name: profile for profile in sorted(found, key=lambda profile: profile.minutes)}

    def load(self) -> nbformat.NotebookNode:
        """A fresh copy of the notebook, in the current notebook format."""
        return read_notebook(self.path)


def root() -> Path:
    """The repository: GALLERY_ROOT if set, else the checkout this package is installed from."""
    chosen = os.environ.get("GALLERY_ROOT")
    return Path(chosen).resolve() if chosen else Path(__file__).resolve().parents[2]


def recipes(base: Path) -> list[Recipe]:
    """Every recipe under base/notebooks in order; raises BadInput naming a notebook with bad metadata."""
    return [_recipe(path) for path in notebooks(base)]


def notebooks(base: Path) -> list[Path]:
    """The notebook files, whether their metadata is sound or not."""
    return sorted((base / "notebooks").glob("[0-9]*_*.ipynb"))


def select(base: Path, wanted: list[str]) -> list[Recipe]:
    """The recipes meant by numbers ("01", "1"), names, paths, or "all"; each once, in the order given."""
    return [_recipe(path) for path in select_paths(base, wanted)]


def select_paths(base: Path, wanted: list[str]) -> list[Path]:
    """As `select`, for notebooks whose metadata may be faulty."""
    if not wanted:
        raise BadInput("no recipe was named: give numbers or names, or `all`; `gallery list` shows them.")
    known = notebooks(base)
    chosen: dict[Path, None] = {}
    for word in wanted:
        chosen.update(dict.fromkeys(known if word == "all" else [_find(known, word)]))
    if not chosen:
        raise BadInput(f"there is no recipe in {base / 'notebooks'}.")
    return list(chosen)


def read_notebook(path: Path) -> nbformat.NotebookNode:
    try:
        return nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises many kinds for a file that is not a notebook
        raise BadInput(f"{path} is not a readable notebook: {error}") from error


def faults_of_metadata(notebook: nbformat.NotebookNode) -> list[str]:
    """What is wrong with the `gallery` metadata of a notebook; nothing when it is complete."""
    metadata = notebook.metadata.get("gallery")
    if not isinstance(metadata, Mapping):
        return [f"has no `gallery` metadata: add {', '.join(REQUIRED)}"]
    faults = [f"metadata gallery.{key} is missing" for key in REQUIRED if not metadata.get(key)]
    profiles = metadata.get("profiles") or {}
    if not isinstance(profiles, Mapping):
        return [*faults, "metadata gallery.profiles is not a mapping of profile names"]
    for name, facts in profiles.items():
        if not name.isidentifier():
            faults.append(f"profile {name!r} is not a Python identifier")
        sound = isinstance(facts, Mapping) and isinstance(facts.get("minutes"), int | float)
        if not sound or not facts.get("hardware") or not isinstance(facts.get("ran"), bool):
            faults.append(f"profile {name!r} needs hardware (text), minutes (number) and ran (true or false)")
    if profiles and "smoke" not in profiles:
        faults.append("has no profile 'smoke', which every recipe must have")
    return faults


def _find(known: list[Path], word: str) -> Path:
    given = Path(word)
    for path in known:
        number = path.stem.split("_")[0]
        numeric = word.isdecimal() and number.isdecimal() and int(word) == int(number)
        if numeric or word == path.stem or (given.suffix == ".ipynb" and given.resolve() == path.resolve()):
            return path
    numbers = {path.stem.split("_")[0]: path for path in known}
    if word.isdecimal():
        raise unknown("recipe", word, numbers)
    raise unknown("recipe", given.stem, [path.stem for path in known])


def _recipe(path: Path) -> Recipe:
    notebook = read_notebook(path)
    faults = faults_of_metadata(notebook)
    if faults:
        raise BadInput(f"{path} {'; '.join(faults)}.")
    return Recipe(path, notebook.metadata["gallery"])
