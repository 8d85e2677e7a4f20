"""Where files of a run go: one rule for rank logs, journals, checkpoints and the MLflow store."""

import os
from pathlib import Path


def runs() -> Path:
    """The folder of all runs: $GALLERY_RUNS, else `runs` beside the helpers package (in a checkout, at its top)."""
    return Path(os.environ.get("GALLERY_RUNS") or Path(__file__).resolve().parents[1] / "runs").resolve()


def this_run() -> Path:
    """The folder of this run: $GALLERY_RUN_DIR, which `gallery run` sets, else `interactive` in the folder of all."""
    return Path(os.environ.get("GALLERY_RUN_DIR") or runs() / "interactive").resolve()
