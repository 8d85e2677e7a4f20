"""Claims about `gallery check`: a sound notebook passes, and each planted fault is found, with its place."""

from __future__ import annotations

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from runner_factory import REPOSITORY, make_gallery

from helpers.runner import check, locks

SOURCES = [
    "# Demo\n\nTwo sentences. See [the project](../pyproject.toml), [below](#Make-it-yours), [docs](https://x.org).",
    "## Setup",
    "import sys\nsys.path[:0] = ['..', '.']\nimport helpers\nhelpers.setup('demo')",
    "## Parameters",
    "profile: str = 'smoke'  # which settings",
    "## Settings",
    "settings = helpers.choose(profile, smoke={'gpus': 2})",
    "## Will it fit?\n\nIn code `[1](2)` is not a link, and `# this` no heading:\n\n```python\n# nor this\n```",
    "%matplotlib inline\ndisplay(settings)",
    "## Data",
    "## Train\n\n### A part of it",
    "def train(settings):\n    return later(settings)\n\n\ndef later(settings):\n    return 0.97",
    "## Results",
    "## Proof",
    "## Register and reload",
    "## Make it yours",
    "helpers.record({'accuracy': train(settings)}, ['accuracy > 0.9']);",
]


@pytest.fixture
def root(tmp_path):
    root = make_gallery(tmp_path)
    (root / "helpers").symlink_to(REPOSITORY / "helpers")
    wanted = locks.specification(root, "demo")
    locks.write_lock(locks.lock_path(root, "demo"), wanted, "iniconfig==2.1.0\n")
    return root


@pytest.fixture
def faults(root):
    """Write a sound notebook, spoil it, check it; returns the faults as text."""

    def faults(spoil=lambda notebook: None):
        notebook = new_notebook()
        notebook.metadata["kernelspec"] = {"name": "demo", "display_name": "demo", "language": "python"}
        notebook.metadata["gallery"] = {
            "title": "Demo", "summary": "s", "environment": "demo", "framework": "f", "task": "t",
            "strategy": "s", "profiles": {"smoke": {"hardware": "2 CPU processes", "minutes": 1, "ran": True}},
        }  # fmt: skip
        for source in SOURCES:
            text = source.startswith("#")
            notebook.cells.append(new_markdown_cell(source) if text else new_code_cell(source))
        notebook.cells[4].metadata["tags"] = ["parameters"]
        spoil(notebook)
        path = root / "notebooks" / "01_demo.ipynb"
        nbformat.write(notebook, path)
        return [str(fault) for fault in check.check(root, path)]

    return faults


def test_a_sound_notebook_has_no_faults(faults):
    assert faults() == []


def put(cell, source):
    """Spoil a notebook by giving one of its cells (counted from 1) another source."""
    return lambda notebook: notebook.cells[cell - 1].update(source=source)


def tell(key, value):
    """Spoil a notebook by changing an entry of its gallery metadata."""
    return lambda notebook: notebook.metadata["gallery"].update({key: value})


FAULTS = {
    "an output": (
        lambda notebook: notebook.cells[2].update(outputs=[new_output("stream", text="x")]),
        "cell 3: has outputs: clear them before committing [outputs]",
    ),
    "an execution count": (
        lambda notebook: notebook.cells[2].update(execution_count=4),
        "cell 3: has execution count 4",
    ),
    "an injected cell": (
        lambda notebook: notebook.cells[2].metadata.update(tags=["injected-parameters"]),
        "cell 3: was injected by a run",
    ),
    "no gallery metadata": (lambda notebook: notebook.metadata.pop("gallery"), "has no `gallery` metadata"),
    "a missing title in the metadata": (tell("title", ""), "metadata gallery.title is missing [metadata]"),
    "no smoke profile": (
        tell("profiles", {"h100": {"hardware": "8xH100", "minutes": 1, "ran": False}}),
        "has no profile 'smoke'",
    ),
    "a profile that is no identifier": (
        tell("profiles", {"8xH100": {"hardware": "8xH100", "minutes": 1, "ran": False}}),
        "profile '8xH100' is not a Python identifier",
    ),
    "another kernel": (
        lambda notebook: notebook.metadata["kernelspec"].update(name="python3"),
        "its kernel is 'python3', its environment 'demo'",
    ),
    "a second title": (put(10, "# Data"), "needs one title (`# ...`), in its first cell; found 2 [headings]"),
    "a missing section": (put(14, "Proof"), "section `## Proof` is missing [headings]"),
    "a section of another name": (put(14, "## Proofs"), "cell 14: section `## Proofs` is not one of Setup"),
    "sections out of order": (
        lambda notebook: notebook.cells.insert(3, notebook.cells.pop(15)),
        "sections are out of order: Setup, Make it yours",
    ),
    "a section twice": (put(11, "## Train\n\n## Train"), "section `## Train` stands 2 times"),
    "no parameters tag": (
        lambda notebook: notebook.cells[4].metadata.update(tags=[]),
        "no cell is tagged `parameters`",
    ),
    "a derived parameter": (put(5, "profile: str = str(1)  # x"), "derives 'profile': only a plain literal"),
    "a parameter without a type": (put(5, "profile = 'smoke'  # x"), "cell 5: parameter 'profile' has no type"),
    "a parameter without a comment": (put(5, "profile: str = 'smoke'"), "cell 5: parameter 'profile' has no comment"),
    "a default of the wrong type": (
        put(5, "profile: str = 'smoke'  # x\nsteps: int = 0.5  # x"),
        "cell 5: parameter steps=0.5 is float: it takes int",
    ),
    "profile not first": (
        put(5, "steps: int = 1  # x\nprofile: str = 'smoke'  # x"),
        "cell 5: the first parameter must be `profile`",
    ),
    "a default profile that does not exist": (
        put(5, "profile: str = 'smok'  # x"),
        "profile='smok' is not one of smoke",
    ),
    "an unbound name": (
        put(7, "settings = choose(profile)"),
        "cell 7: uses 'choose', which nothing above defines [names]",
    ),
    "a name bound only below": (put(9, "display(train)"), "cell 9: uses 'train', which nothing above defines"),
    "a misspelt name inside a function": (
        put(12, "def train(settings):\n    return setings"),
        "cell 12: uses 'setings', which nothing above defines",
    ),
    "a helper that does not exist": (
        put(7, "%matplotlib inline\nfrom helpers import chose\nsettings = chose(profile)"),
        "cell 7: imports 'chose' from helpers, which has no such name [imports]",
    ),
    "a name that a helper does not have": (
        put(7, "from helpers.settings import Choices\nsettings = Choices(profile)"),
        "cell 7: imports 'Choices' from helpers.settings, which has no such name",
    ),
    "a syntax error": (put(9, "if True"), "cell 9: is not valid Python: line 1"),
    "setup of another environment": (
        put(3, "import helpers\nhelpers.setup('trl')"),
        "cell 3: setup asks for 'trl', but the metadata says 'demo' [lock]",
    ),
    "no setup": (put(3, "import helpers"), "no cell calls helpers.setup('demo')"),
    "an environment that does not exist": (
        tell("environment", "dmeo"),
        "environment 'dmeo' is unknown. Did you mean 'demo'?",
    ),
    "a link that leads nowhere": (
        put(10, "## Data\n\n[x](../nothing.md)"),
        "cell 10: link ../nothing.md leads nowhere [links]",
    ),
    "a picture that is not there": (put(10, '## Data\n\n<img src="a.png">'), "cell 10: link a.png leads nowhere"),
    "a link to a section that is not there": (put(10, "## Data\n\n[x](#Nothing)"), "link #Nothing leads to no heading"),
    "too much code": (put(9, "x = 1\n" * 301), "lines of code: at most 300 [length]"),
    "a profile that the settings do not offer": (
        tell("profiles", {n: {"hardware": "h", "minutes": 1, "ran": False} for n in ("smoke", "laptop")}),
        "cell 7: profiles differ from the metadata's: only here -, only there laptop [profiles]",
    ),
    "no record at the end": (put(17, "train(settings)"), "cell 17: the last code cell must call record(...) [record]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_finds(faults, name):
    spoil, message = FAULTS[name]
    found = faults(spoil)
    assert any(message in fault for fault in found), found


def test_a_stale_lock_is_found_and_says_what_changed(faults, root):
    """A requirement was added to pyproject.toml, the lock was not made again, and users got the old environment."""
    path = root / "pyproject.toml"
    path.write_text(path.read_text().replace('"iniconfig==2.1.0"', '"iniconfig==2.1.0", "tqdm>=4"'))
    (fault,) = faults()
    assert "notebooks/locks/demo.txt is stale: pyproject.toml has changed since (+tqdm>=4)" in fault
    assert "Run `gallery lock demo`" in fault


def test_a_missing_lock_is_found(faults, root):
    locks.lock_path(root, "demo").unlink()
    (fault,) = faults()
    assert "environment demo has no lock" in fault


def test_a_file_that_is_no_notebook_is_bad_input(root):
    path = root / "notebooks" / "01_demo.ipynb"
    path.write_text("{")
    with pytest.raises(check.BadInput, match="is not a readable notebook"):
        check.check(root, path)
