"""Claims about environments and locks: real uv, real packages, real interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from runner_factory import REPOSITORY, add_notebook, environment, make_gallery

from helpers.runner import batch, cli, environments, locks, registry
from helpers.runner.errors import NOTEBOOK_FAILED, BadInput, BuildFailed


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "KERNELS", tmp_path / "kernels")
    return make_gallery(tmp_path / "gallery")


@pytest.fixture
def locked(root):
    wanted = locks.specification(root, "demo")
    locks.write_lock(locks.lock_path(root, "demo"), wanted, "iniconfig==2.1.0\n")
    return root


def test_a_lock_leaves_out_what_torch_pins_itself_and_any_build_or_place_of_this_machine(root, monkeypatch):
    """One lock for CPU and CUDA machines: a CPU wheel lying about here must not end in everyone's lock."""
    monkeypatch.setenv("UV_FIND_LINKS", "/no/such/folder")
    path = root / "pyproject.toml"
    path.write_text(path.read_text().replace("iniconfig==2.1.0", "torch==2.13.0"))
    lines = locks.compile_lock(root, "demo").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert "torch==2.13.0" in pinned
    assert all("==" in line.split(";")[0] for line in pinned)
    assert not [line for line in pinned if line.startswith(("nvidia", "cuda", "triton"))]
    assert not [line for line in lines if "http" in line or "find-links" in line or "index-url" in line or "+" in line]
    assert locks.fault(root, "demo") is None


def test_locking_again_changes_nothing(root):
    path = locks.compile_lock(root, "demo")
    first = path.read_text()
    assert "iniconfig==2.1.0" in first
    locks.compile_lock(root, "demo")
    assert path.read_text() == first


def test_a_requirement_without_a_solution_is_explained(root):
    path = root / "pyproject.toml"
    path.write_text(path.read_text().replace("iniconfig==2.1.0", "iniconfig==999"))
    with pytest.raises(BuildFailed, match=r"(?s)environment demo cannot be resolved:.*iniconfig"):
        locks.compile_lock(root, "demo")


def test_nvidia_ml_py_is_not_one_of_torchs_pins(root):
    resolved = "nvidia-ml-py==13.0\nnvidia-cublas==13.1\ntriton==3.5\ncuda-bindings==13.0\na==1+cpu ; x == '1'\n"
    locks.write_lock(locks.lock_path(root, "demo"), locks.specification(root, "demo"), resolved)
    lines = locks.lock_path(root, "demo").read_text().splitlines()
    assert [line for line in lines if line and line[0] != "#"] == ["nvidia-ml-py==13.0", "a==1 ; x == '1'"]


@pytest.mark.parametrize("name", locks.environment_names(REPOSITORY))
def test_the_committed_locks_agree_with_pyproject(name):
    assert locks.fault(REPOSITORY, name) is None


def test_the_tests_run_with_the_versions_that_the_recipes_are_locked_to():
    pytorch = set(locks.lock_path(REPOSITORY, "pytorch").read_text().splitlines())
    tests = set(locks.lock_path(REPOSITORY, "tests").read_text().splitlines())
    different = {line for line in pytorch - tests if not line.startswith("#")}
    assert {line for line in different if ";" not in line} == set()


def test_an_environment_is_made_once_and_registered_as_a_kernel_of_its_name(locked):
    said: list[str] = []
    python = environments.make(locked, "demo", said.append)
    assert "environment demo: ready" in said
    code = "import demo, iniconfig; from importlib.metadata import version; print(version('iniconfig'), demo.__file__)"
    output = subprocess.run([python, "-c", code], text=True, capture_output=True, check=True).stdout
    assert output.split() == ["2.1.0", str(locked / "demo" / "__init__.py")]  # pinned, and the project itself
    kernel = json.loads((environments.KERNELS / "demo" / "kernel.json").read_text())
    assert kernel["argv"][0] == str(python)

    said.clear()
    begun = time.monotonic()
    environments.make(locked, "demo", said.append)
    assert (said, time.monotonic() - begun < 1) == ([], True)


def test_a_changed_lock_makes_the_environment_again(locked):
    environments.make(locked, "demo", lambda _: None)
    lock = locks.lock_path(locked, "demo")
    lock.write_text(lock.read_text().replace("iniconfig==2.1.0", "iniconfig==2.0.0"))
    assert not environments.is_ready(locked, "demo")
    said: list[str] = []
    environments.make(locked, "demo", said.append)
    assert said[0] == "environment demo: making it again (its lock has changed)"
    assert "iniconfig==2.0.0" in environments.freeze(environments.python_of(locked, "demo"))


def test_of_two_builders_at_once_the_second_waits_and_uses_the_firsts_work(locked):
    said: list[str] = []
    builders = [threading.Thread(target=environments.make, args=(locked, "demo", said.append)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(60)
    assert said.count("environment demo: ready") == 1
    assert said.count("environment demo: another process is making it; waiting") == 1


def test_an_environment_whose_build_was_killed_is_made_again(locked, tmp_path):
    """A laptop lid closed in mid-install left a folder that looked like an environment and was not one."""
    slow = tmp_path / "uv"
    slow.write_text(f'#!/bin/sh\ncase "$2" in install) exec sleep 600 ;; *) exec {locks.uv()} "$@" ;; esac\n')
    slow.chmod(0o755)
    code = (
        "import sys; from pathlib import Path; from helpers.runner import environments, locks\n"
        f"environments.KERNELS = Path({str(tmp_path / 'kernels')!r}); locks.uv = lambda: {str(slow)!r}\n"
        f"environments.make(Path({str(locked)!r}), 'demo')"
    )
    command = [sys.executable, "-u", "-c", code]
    builder = subprocess.Popen(command, env=environment(locked), start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not environments.python_of(locked, "demo").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(builder.pid, signal.SIGKILL)
    builder.wait()
    assert not environments.is_ready(locked, "demo")
    said: list[str] = []
    environments.make(locked, "demo", said.append)
    assert said[0] == "environment demo: making it again (an earlier build was interrupted)"
    assert environments.is_ready(locked, "demo")


def test_a_package_that_cannot_be_installed_ends_with_uvs_words_and_no_environment(locked):
    lock = locks.lock_path(locked, "demo")
    lock.write_text(lock.read_text().replace("iniconfig==2.1.0", "iniconfig==999"))
    with pytest.raises(BuildFailed, match=r"(?s)demo: install packages failed \(exit code 1\):.*iniconfig"):
        environments.make(locked, "demo", lambda _: None)
    assert not environments.is_ready(locked, "demo")


def test_an_environment_that_cannot_be_made_costs_its_own_recipes_only(locked, capsys):
    """`gallery run all` once ended at the first such environment, without the table of what had run before."""
    lock = locks.lock_path(locked, "demo")
    lock.write_text(lock.read_text().replace("iniconfig==2.1.0", "iniconfig==999"))
    for name in ("01_first", "02_second"):
        add_notebook(locked, name=name)
    code = batch.run(locked, batch.Request(["all"]), Console(width=200), print)
    rows = [line for line in capsys.readouterr().out.splitlines() if "no environment" in line]
    assert code == NOTEBOOK_FAILED
    assert [row.split()[0] for row in rows] == ["01_first", "02_second"]


def test_a_stale_lock_stops_a_run_before_anything_is_built(locked, monkeypatch, capfd):
    path = locked / "pyproject.toml"
    path.write_text(path.read_text().replace("iniconfig==2.1.0", "iniconfig>=2"))
    add_notebook(locked)
    monkeypatch.setenv("GALLERY_ROOT", str(locked))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "1"])
    assert ended.value.code == 2
    assert "is stale: pyproject.toml has changed since (+iniconfig>=2, -iniconfig==2.1.0)" in capfd.readouterr().err
    assert not (locked / ".envs").exists()


def test_an_unknown_environment_names_the_nearest(root):
    with pytest.raises(BadInput, match=r"environment 'dem' is unknown\. Did you mean 'demo'"):
        locks.specification(root, "dem")


def test_an_environment_may_ask_for_another_python_and_replace_pins(root):
    path = root / "pyproject.toml"
    table = "\n[tool.gallery.environments.demo]\npython = '3.12'\noverrides = ['a>=2']\ndrop = ['b*']\n"
    before = locks.specification(root, "demo").digest
    path.write_text(path.read_text() + table)
    wanted = locks.specification(root, "demo")
    assert (wanted.python, wanted.overrides, wanted.drop) == ("3.12", ("a>=2",), ("b*",))
    assert wanted.digest != before


def test_pips_settings_reach_uv_unless_uv_has_its_own():
    pip = {
        "PIP_FIND_LINKS": "/a /b", "PIP_INDEX_URL": "https://x/simple", "PIP_EXTRA_INDEX_URL": "https://y https://z",
    }  # fmt: skip
    found = registry.uv_environment(pip)
    assert found["UV_FIND_LINKS"] == "/a,/b"
    assert found["UV_DEFAULT_INDEX"] == "https://x/simple"
    assert found["UV_INDEX"] == "https://y https://z"
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    own = {"UV_FIND_LINKS": "/c", "UV_INDEX_URL": "https://w", "UV_EXTRA_INDEX_URL": "https://v"}
    found = registry.uv_environment({**pip, **own})
    assert found["UV_FIND_LINKS"] == "/c"
    assert "UV_DEFAULT_INDEX" not in found
    assert "UV_INDEX" not in found
    assert "VIRTUAL_ENV" not in registry.uv_environment({"VIRTUAL_ENV": "/x"})
