"""The launcher inside real Jupyter kernels: live output, the stop button, a killed kernel, two notebooks at once."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Kernel, eventually, rank_processes

SLEEPER = """
import time
from helpers import distributed

@distributed(gpus=2)
def job():
    print("running", flush=True)
    time.sleep(600)
job.distributed()
"""


def wait_for_ranks(private_tmp: Path, log_root: Path) -> None:
    """Until both ranks are inside the function."""
    logs = lambda: [path.read_text() for path in log_root.glob("logs/*/rank*.log")]  # noqa: E731
    assert eventually(lambda: len(logs()) == 2 and all("running" in log for log in logs()), 60), logs()
    assert len(rank_processes(private_tmp)) == 2


def test_functions_and_classes_of_notebook_cells_reach_the_ranks_and_come_back_as_themselves(
    new_kernel: Callable[[], Kernel], nothing_left: Any
) -> None:
    kernel = new_kernel()
    _, error = kernel.run("""
from dataclasses import dataclass
from helpers import distributed

class Diverged(Exception):
    pass

@dataclass
class Point:
    x: int

def double(x):
    return 2 * x

@distributed(gpus=2)
def job(point):
    import os
    return Point(double(point.x) + int(os.environ["RANK"]))

@distributed(gpus=1)
def bad():
    raise Diverged("at step 3")
""")
    assert error is None
    text, error = kernel.run("print([type(p) is Point and p.x for p in job.distributed(Point(5))])")
    assert error is None
    assert "[10, 11]" in text
    text, error = kernel.run("""
try:
    bad.distributed()
except Diverged as caught:
    print("caught as itself:", caught, caught.rank)
""")
    assert error is None
    assert "caught as itself: at step 3 0" in text
    _, error = kernel.run("bad.distributed()")
    assert error
    assert error["ename"] == "Diverged"
    assert 'raise Diverged("at step 3")' in "".join(error["traceback"]).replace("\x1b[39m", ""), error["traceback"]


def test_prints_of_rank_zero_appear_while_the_job_runs_and_bars_stay_one_line(
    new_kernel: Callable[[], Kernel], nothing_left: Any
) -> None:
    kernel = new_kernel()
    message = kernel.start("""
from helpers import distributed

@distributed(gpus=2)
def job():
    import os, sys, time
    print("first from", os.environ["RANK"])
    for step in range(20):
        print(f"\\r{step}/20", end="", file=sys.stderr)
        time.sleep(0.15)
    print("\\nlast")
job.distributed()
print("returned")
""")
    seen = [(at, content["text"]) for at, kind, content in kernel.outputs(message) if kind == "stream"]
    text = "".join(part for _, part in seen)
    moments = {word: next(at for at, part in seen if word in part) for word in ("first", "last", "returned")}
    assert moments["last"] - moments["first"] > 2, "the first print was held back to the end"
    assert text.count("first") == 1, "rank 0 alone prints into the cell"
    assert "from 0" in text
    bar = text[text.index("from 0") : text.index("last")].strip("\n")
    assert bar.count("\n") == 1, repr(bar)
    assert bar.count("\r") >= 5, repr(bar)


def test_the_stop_button_ends_all_ranks_within_five_seconds_and_the_kernel_stays_usable(
    new_kernel: Callable[[], Kernel], private_tmp: Path, run_folder: Path, nothing_left: Any
) -> None:
    kernel = new_kernel()
    message = kernel.start(SLEEPER)
    wait_for_ranks(private_tmp, run_folder)
    kernel.manager.interrupt_kernel()
    begin = time.monotonic()
    assert eventually(lambda: not rank_processes(private_tmp), 5), "ranks outlived the interrupt"
    _, error = kernel.finish(message)
    assert error
    assert error["ename"] == "KeyboardInterrupt"
    assert time.monotonic() - begin < 5
    text, error = kernel.run("print(1 + 1)")
    assert error is None
    assert text == "2\n"


def test_a_killed_kernel_leaves_no_orphan_rank(
    new_kernel: Callable[[], Kernel], private_tmp: Path, run_folder: Path, nothing_left: Any
) -> None:
    kernel = new_kernel()
    kernel.start(SLEEPER)
    wait_for_ranks(private_tmp, run_folder)
    os.kill(kernel.manager.provisioner.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert eventually(lambda: not rank_processes(private_tmp), 5), "ranks outlived the kernel"


def test_two_notebooks_launch_at_the_same_time_without_a_clash(
    new_kernel: Callable[[], Kernel], nothing_left: Any
) -> None:
    first, second = new_kernel(), new_kernel()
    code = """
from helpers import distributed, ranks

@distributed(gpus=2)
def job(value):
    place = ranks.init()
    return value + ranks.all_mean(place.rank)
print(job.distributed({value}))
"""
    messages = [kernel.start(code.format(value=v)) for kernel, v in ((first, 10), (second, 20))]
    for kernel, message, told in zip((first, second), messages, ("[10.5, 10.5]", "[20.5, 20.5]"), strict=True):
        text, error = kernel.finish(message)
        assert error is None, error
        assert told in text


@pytest.mark.parametrize("missing", ["gpus", "keyword"])
def test_a_bad_call_fails_in_the_cell_before_any_process_starts(
    new_kernel: Callable[[], Kernel], private_tmp: Path, missing: str
) -> None:
    kernel = new_kernel()
    call = {
        "gpus": "distributed(gpus=-1)(print)",
        "keyword": "distributed(gpus=2)(lambda a: a).distributed(b=1)",
    }
    _, error = kernel.run(f"from helpers import distributed\n{call[missing]}")
    assert error
    assert error["ename"] == {"gpus": "ValueError", "keyword": "TypeError"}[missing]
    assert not list(private_tmp.glob("ddp-gallery-*"))
