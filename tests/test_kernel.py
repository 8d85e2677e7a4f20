"""Claims about helpers.kernel: what setup says on the right kernel, on a wrong one, and on Databricks."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types

import pytest

from helpers.kernel import LOCKS, WrongKernel, read_lock, setup

PYTEST = importlib.metadata.version("pytest")


@pytest.fixture
def locks(tmp_path):
    def write(direct: str, pinned: str):
        lines = [f"# direct: {line}" for line in direct.split("|")] + pinned.split("|")
        (tmp_path / "demo.txt").write_text("\n".join(lines) + "\n")
        return tmp_path

    return write


def test_the_right_kernel_gets_one_sentence_with_python_torch_and_devices(locks, capsys):
    setup("demo", locks=locks("pytest>=8", f"pytest=={PYTEST}"))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Environment demo: Python 3.")
    assert "CPU core" in line or " x " in line


def test_a_wrong_kernel_names_what_is_missing_and_the_command_that_mends_it(locks):
    with pytest.raises(WrongKernel) as caught:
        setup("demo", locks=locks("no-such-package>=1|pytest", f"no-such-package==1.5|pytest=={PYTEST}"))
    message = str(caught.value)
    assert "no-such-package 1.5 is missing" in message
    assert "`make lab NAME=demo`" in message
    assert "its kernel is 'demo'" in message
    assert PYTEST not in message  # what is there is not listed


def test_ipython_shows_the_sentence_without_a_traceback():
    assert WrongKernel("choose another").__class__._render_traceback_(WrongKernel("x")) == ["WrongKernel: x"]


def test_another_version_of_a_package_the_recipe_pins_exactly_is_refused(locks):
    with pytest.raises(WrongKernel, match=rf"pytest is {PYTEST}, locked 1\.0"):
        setup("demo", locks=locks("pytest==1.0", "pytest==1.0"))


def test_another_version_of_a_package_with_a_range_is_a_note(locks, capsys):
    setup("demo", locks=locks("pytest>=1", "pytest==1.0"))
    assert f"Other versions than the recipe was run with: pytest is {PYTEST}, locked 1.0." in capsys.readouterr().out


def test_a_build_suffix_is_not_another_version(locks, monkeypatch, capsys):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    setup("demo", locks=locks("torch==2.13.0", "torch==2.13.0 ; sys_platform == 'linux'"))
    assert "Other versions" not in capsys.readouterr().out


def test_an_unknown_environment_names_the_known_ones(locks):
    with pytest.raises(ValueError, match=r"environment='pytorhc' has no lock .*: known environments are demo"):
        setup("pytorhc", locks=locks("pytest", f"pytest=={PYTEST}"))


def test_the_committed_lock_of_recipe_01_pins_everything_it_asks_for():
    lock = read_lock("pytorch", LOCKS)
    assert lock.direct["torch"]  # pinned exactly
    assert set(lock.direct) <= set(lock.versions)


class Restart(Exception):
    pass


@pytest.fixture
def databricks(monkeypatch):
    """The platform as setup sees it: its variable, and dbutils where the real one is imported from."""

    def restart():
        raise Restart

    runtime = types.ModuleType("databricks.sdk.runtime")
    runtime.dbutils = types.SimpleNamespace(library=types.SimpleNamespace(restartPython=restart))
    for name in ("databricks", "databricks.sdk"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "databricks.sdk.runtime", runtime)
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.0")


def test_on_databricks_the_lock_is_installed_and_python_restarted(databricks, locks, monkeypatch):
    present: set[str] = set()
    commands = []

    def version(name):
        if name not in present:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.5"

    def pip(command, **_):
        commands.append(command)
        present.add("no-such-package")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(Restart):
        setup("demo", locks=locks("no-such-package", "no-such-package==1.5"))
    assert commands[0][1:4] == ["-m", "pip", "install"]
    assert commands[0][-1].endswith("demo.txt")


def test_on_databricks_a_failed_installation_shows_pips_last_lines(databricks, locks):
    with pytest.raises(WrongKernel, match=r"(?s)demo.txt failed \(pip exit code 1\):\n.+"):
        setup("demo", locks=locks("no-such-package", "--no-index|no-such-package==1.5"))


def test_on_databricks_nothing_restarts_when_nothing_is_missing(databricks, locks, capsys):
    setup("demo", locks=locks("pytest", f"pytest=={PYTEST}"))
    assert "Environment demo" in capsys.readouterr().out
