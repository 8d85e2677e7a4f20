"""Claims about doctor, clean and the first steps on a bare machine."""

from __future__ import annotations

import ast
import io
import mmap
import os
import subprocess
import sys
import time

import nbformat
import pytest
from runner_factory import REPOSITORY, add_notebook, make_gallery, runs

from helpers.runner import bootstrap, clean, cli, doctor, execute, hardware, live, processes


@pytest.fixture
def root(tmp_path, monkeypatch):
    root = make_gallery(tmp_path)
    monkeypatch.setenv("GALLERY_ROOT", str(root))
    return root


def test_doctor_runs_offline_and_names_a_remedy_for_whatever_is_wrong(root, monkeypatch):
    def offline(*_, **__):
        raise OSError("unreachable")

    monkeypatch.setattr(doctor, "_hub", lambda real=doctor._hub: real(offline))
    findings = list(doctor.examine(root))
    topics = {finding.topic for finding in findings}
    assert topics >= {"machine", "GPUs", "environment demo", "disk", "shared memory", "ports", "hub"}
    assert all(finding.remedy for finding in findings if finding.state == doctor.BAD)
    (hub,) = [finding for finding in findings if finding.topic == "hub"]
    assert (hub.state, "does not answer" in hub.text) == (doctor.NOTE, True)
    (demo,) = [finding for finding in findings if finding.topic == "environment demo"]
    assert (demo.state, demo.remedy) == (doctor.BAD, "gallery lock demo")


def test_doctor_finds_stale_shared_memory_and_leaves_what_is_in_use(tmp_path):
    (tmp_path / "torch_123_abc").write_bytes(b"x" * 4096)
    (tmp_path / "someone-elses").write_bytes(b"x")
    (finding,) = doctor._stale_segments(tmp_path)
    assert (finding.state, "1 stale segments" in finding.text) == (doctor.BAD, True)
    assert finding.remedy == f"rm {tmp_path / 'torch_123_abc'}"

    with (tmp_path / "torch_123_abc").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        (finding,) = doctor._stale_segments(tmp_path)
        assert finding.state == doctor.GOOD


def test_doctor_tells_a_cpu_build_of_torch_on_a_machine_with_gpus(monkeypatch):
    gpu = {"name": "NVIDIA H100", "memory.total": "81559 MiB", "driver_version": "570", "uuid": "x"}
    monkeypatch.setattr(hardware, "gpus", lambda: [gpu])
    monkeypatch.setattr(doctor, "ASK_TORCH", CPU_TORCH)
    (finding,) = doctor._torch("environment x", "x", sys.executable)
    assert finding.state == doctor.BAD
    assert "CPU build, but this machine has GPUs" in finding.text
    assert "gallery env x --rebuild" in finding.remedy


CPU_TORCH = """
import json
print(json.dumps({"torch": "2.13.0+cpu", "cuda": None, "available": False, "devices": 0, "nccl": None, "gloo": True}))
"""


def test_doctor_tells_an_environment_whose_torch_does_not_import(monkeypatch):
    monkeypatch.setattr(doctor, "ASK_TORCH", "raise ImportError('libcudart.so.13: cannot open')")
    (finding,) = doctor._torch("environment x", "x", sys.executable)
    assert (finding.state, "libcudart.so.13" in finding.text) == (doctor.BAD, True)


def invoke(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    written = capsys.readouterr()
    return ended.value.code or 0, written.out + written.err


def test_clean_says_what_it_frees_asks_first_and_keeps_the_newest(root, capsys, monkeypatch):
    folders = [execute.new_folder(root / "runs" / "01_demo") for _ in range(3)]
    for folder in folders:
        (folder / "big").write_bytes(b"x" * 2**20)
    execute.point_latest(folders[-1])
    code, output = invoke(capsys, "clean")
    assert (code, "runs: 1 folders, 3.0 MiB" in output) == (0, True), output
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # nobody to ask
    code, output = invoke(capsys, "clean", "runs")
    assert (code, "give --yes" in output, len(runs(root))) == (2, True, 3), output
    code, output = invoke(capsys, "clean", "run", "--yes")
    assert (code, "Did you mean 'runs'?" in output, len(runs(root))) == (2, True, 3), output
    code, output = invoke(capsys, "clean", "runs", "--keep", "1", "--yes")
    assert (code, "freed 2.0 MiB" in output, runs(root)) == (0, True, [folders[-1]]), output
    code, output = invoke(capsys, "clean", "all", "--yes")
    assert (code, (root / "runs" / "01_demo").exists()) == (0, False), output


def test_clean_leaves_no_link_that_leads_nowhere(root):
    folder = execute.new_folder(root / "runs" / "01_demo")
    execute.point_latest(folder)
    (heap,) = [heap for heap in clean.heaps(root).values() if heap.paths]
    clean.remove(heap)
    assert not (root / "runs" / "01_demo" / "latest").is_symlink()


@pytest.mark.parametrize(
    ("version", "modules", "message"),
    [
        ((3, 9, 2), (), "python3 is 3.9.2"),
        ((3, 11, 0), ("no_such_module",), "apt-get install python3.11-venv"),
        ((3, 11, 0), ("venv",), None),
    ],
)
def test_a_python_that_cannot_serve_is_told_so_in_a_sentence(version, modules, message):
    problem = bootstrap.unfit_python(version, modules)
    assert problem is None if message is None else message in problem


def test_the_first_file_that_runs_on_a_bare_machine_can_be_read_by_old_pythons():
    """A SyntaxError in line 1 would hide the sentence that says which Python is needed."""
    for name in ("__init__.py", "runner/__init__.py", "runner/bootstrap.py"):
        ast.parse((REPOSITORY / "helpers" / name).read_text(), feature_version=(3, 7))


def test_make_help_lists_the_two_commands():
    done = subprocess.run(["make", "help"], cwd=REPOSITORY, text=True, capture_output=True, check=True)
    assert "make run [RECIPE=01] [PROFILE=smoke]" in done.stdout
    assert "make test" in done.stdout


def test_make_without_python_says_what_is_missing():
    done = subprocess.run(["make", "run", "PYTHON=no-such-python"], cwd=REPOSITORY, text=True, capture_output=True)
    assert done.returncode != 0
    assert "no-such-python is not on PATH: install Python 3.11 or newer" in done.stderr


def test_a_long_step_is_never_silent():
    said: list[str] = []
    code = "import time; print('begin', flush=True); time.sleep(2.5)"
    command = [sys.executable, "-c", code]
    status, tail = processes.run_with_signs_of_life(command, "step", said.append, env=os.environ, every=1)
    assert (status, tail) == (0, "begin")
    assert said[0] == "  begin"
    assert any(line.startswith("step ... ") for line in said[1:])


def test_a_cell_that_is_still_shows_a_sign_of_life(root, monkeypatch):
    monkeypatch.setattr(live, "SIGN_OF_LIFE", 1.0)
    notebook = nbformat.read(add_notebook(root, "x = 1"), as_version=4)
    stream = io.StringIO()
    shown = live.Live(notebook, stream)
    with shown.cell(3):
        time.sleep(2.2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "[ 2/3] Train | x = 1"
    assert "        ... running for 1 s" in lines or "        ... running for 2 s" in lines
