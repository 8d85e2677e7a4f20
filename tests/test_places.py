"""Claims about where a run's files go."""

from pathlib import Path

from helpers import places

ROOT = Path(__file__).resolve().parents[1]


def test_without_instructions_runs_lie_beside_the_helpers_wherever_the_kernel_was_started(monkeypatch, tmp_path):
    """Logs once went to the kernel's folder and the store to the repository: two half-runs in two places."""
    for name in ("GALLERY_RUNS", "GALLERY_RUN_DIR"):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert places.runs() == ROOT / "runs"
    assert places.this_run() == ROOT / "runs" / "interactive"


def test_each_variable_moves_its_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("GALLERY_RUN_DIR")
    monkeypatch.setenv("GALLERY_RUNS", str(tmp_path / "all"))
    assert places.this_run() == tmp_path / "all" / "interactive"
    monkeypatch.setenv("GALLERY_RUN_DIR", str(tmp_path / "one"))
    assert (places.runs(), places.this_run()) == (tmp_path / "all", tmp_path / "one")
