"""The launcher's contract, held against real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import eventually

from helpers import distributed, ranks
from helpers.launch import PayloadError, WorkerDied, WorkerError, WorkersStalled, local

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_values_come_back_by_rank_with_arguments_closures_and_keywords() -> None:
    offset = 100

    def helper(value: int) -> int:
        return value + offset

    @distributed(gpus=2)
    def job(a: int, *, b: int = 2) -> tuple[int, int, float]:
        place = ranks.init()
        return place.rank, helper(a + b), ranks.all_mean(place.rank)

    assert job.distributed(1, b=10) == [(0, 111, 0.5), (1, 111, 0.5)]


def test_arguments_that_do_not_fit_raise_type_error_before_any_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "run", lambda *a, **k: pytest.fail("a job was started"))

    @distributed(gpus=2)
    def job(a: int) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        job.distributed()
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        job.distributed(1, z=2)


def test_a_direct_call_names_both_ways_to_run_the_function() -> None:
    @distributed(gpus=2)
    def job(a: int) -> int:
        return a

    with pytest.raises(RuntimeError, match=r"job\.distributed\(\.\.\.\).*job\.func\(\.\.\.\)"):
        job(1)
    assert job.func(3) == 3


def test_a_raising_rank_stops_the_others_and_keeps_its_exception_type() -> None:
    """Rank 0 sits in an all_reduce; without help it would wait there for the process group's timeout."""

    @distributed(gpus=2)
    def job() -> None:
        place = ranks.init()
        ranks.all_mean(0.0)
        if place.rank == 1:
            raise ValueError(f"bad batch {time.time()}")
        ranks.all_mean(1.0)

    with pytest.raises(ValueError, match="bad batch") as caught:
        job.distributed()
    assert time.time() - float(str(caught.value).split()[-1]) < 5
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert caught.value.host
    assert "bad batch" in caught.value.remote_traceback
    assert 'raise ValueError(f"bad batch' in str(caught.value.__cause__), "the cell's own line is shown"
    assert any("rank 1" in note for note in caught.value.__notes__)


class DivergedError(Exception):
    def __init__(self, step: int, loss: float) -> None:
        super().__init__(step, loss)
        self.step = step


class Unreturnable(Exception):
    """Pickles, but cannot be built again from what pickle keeps."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def test_a_custom_exception_arrives_as_itself_with_its_attributes() -> None:
    @distributed(gpus=1)
    def job() -> None:
        raise DivergedError(7, 0.5)

    with pytest.raises(DivergedError) as caught:
        job.distributed()
    assert caught.value.step == 7


def test_an_exception_that_cannot_be_unpickled_still_arrives_as_text_with_its_name() -> None:
    @distributed(gpus=1)
    def job() -> None:
        raise Unreturnable(3, 4)

    with pytest.raises(WorkerError, match=r"Unreturnable raised on rank 0 .*: 3 and 4"):
        job.distributed()


def test_a_killed_rank_is_told_by_number_and_signal_with_the_out_of_memory_hint() -> None:
    @distributed(gpus=2)
    def job() -> None:
        place = ranks.init()
        ranks.all_mean(0.0)
        print("about to die" if place.rank else "waiting", flush=True)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.all_mean(1.0)

    with pytest.raises(WorkerDied, match=r"(?s)rank 1 .*SIGKILL.*out-of-memory.*about to die") as caught:
        job.distributed()
    assert (caught.value.rank, caught.value.signal, caught.value.exit_code) == (1, signal.SIGKILL, None)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        (lambda: os._exit(3), "exited with code 3 before the function returned"),
        (lambda: os._exit(0), "exited with code 0 before the function returned"),
        (lambda: sys.exit(3), r"called sys.exit\(3\)"),
        (lambda: sys.exit(), r"called sys.exit\(None\)"),
    ],
    ids=["os._exit(3)", "os._exit(0)", "sys.exit(3)", "sys.exit()"],
)
def test_a_rank_that_leaves_without_returning_is_told(ending: Any, told: str) -> None:
    @distributed(gpus=2)
    def job() -> None:
        if os.environ["RANK"] == "1":
            ending()
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(WorkerDied, match=f"rank 1 .*{told}") as caught:
        job.distributed()
    assert caught.value.rank == 1
    assert caught.value.exit_code == (3 if "3" in told else 0)
    assert time.monotonic() - begin < 20, "rank 0 was waited for"


def test_a_collective_that_waits_in_vain_names_the_missing_rank_and_shows_every_stack() -> None:
    from datetime import timedelta

    def nap() -> None:
        time.sleep(600)

    @distributed(gpus=2)
    def job() -> None:
        place = ranks.init(timeout=timedelta(seconds=4))
        ranks.all_mean(0.0)
        if place.rank == 1:
            nap()
        ranks.all_mean(1.0)

    with pytest.raises(WorkersStalled, match=r"(?s)Missing from the collective.*: rank 1\.") as caught:
        job.distributed()
    assert caught.value.missing == [1]
    assert "nap" in caught.value.stacks[1]
    assert "all_mean" in caught.value.stacks[0]


def test_a_job_past_its_timeout_shows_where_every_rank_stands() -> None:
    def dawdle() -> None:
        time.sleep(600)

    @distributed(gpus=2, timeout=3)
    def job() -> None:
        dawdle()

    begin = time.monotonic()
    with pytest.raises(WorkersStalled, match=r"timeout=3 s") as caught:
        job.distributed()
    assert time.monotonic() - begin < 3 + 5
    assert all("dawdle" in caught.value.stacks[rank] for rank in (0, 1))


def test_a_rank_that_ignores_sigterm_cannot_hold_up_the_failure() -> None:
    """Frameworks install SIGTERM handlers of their own; torch's agent would wait 30 s for each."""

    @distributed(gpus=2)
    def job() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(1)
            raise ValueError(str(time.time()))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    with pytest.raises(ValueError, match=r"\d+") as caught:
        job.distributed()
    assert time.time() - float(str(caught.value)) < 5


def test_a_network_error_of_a_rank_itself_is_not_taken_for_the_echo_of_another_rank() -> None:
    @distributed(gpus=2)
    def job() -> None:
        if os.environ["RANK"] == "0":
            time.sleep(1)
            raise ConnectionResetError(104, "Connection reset by peer")
        time.sleep(60)

    with pytest.raises(ConnectionResetError) as caught:
        job.distributed()
    assert caught.value.rank == 0  # type: ignore[attr-defined]


def test_a_rank_whose_loop_is_shorter_is_told_beside_the_error_of_the_one_that_waits() -> None:
    @distributed(gpus=2)
    def job() -> None:
        place = ranks.init()
        if place.rank == 1:
            time.sleep(0.5)
            ranks.all_mean(1.0)

    with pytest.raises(RuntimeError) as caught:
        job.distributed()
    assert caught.value.rank == 1  # type: ignore[attr-defined]
    assert any("rank 0 had returned already" in note for note in caught.value.__notes__)


def test_a_rank_that_somebody_terminates_is_told_by_its_number() -> None:
    @distributed(gpus=2)
    def job() -> None:
        if os.environ["RANK"] == "1":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with pytest.raises(WorkerDied, match=r"rank 1 .*SIGTERM"):
        job.distributed()


def test_a_timeout_that_has_nothing_to_do_with_ranks_arrives_as_itself() -> None:
    @distributed(gpus=2)
    def job() -> None:
        subprocess.run(["sleep", "9"], timeout=0.2)

    with pytest.raises(subprocess.TimeoutExpired):
        job.distributed()


def test_a_message_that_no_encoding_can_write_arrives_all_the_same() -> None:
    @distributed(gpus=1)
    def job() -> None:
        raise ValueError("bad file \udcff")

    with pytest.raises(ValueError, match="bad file \udcff"):
        job.distributed()


def test_one_long_line_without_an_end_does_not_hold_up_the_clock() -> None:
    """A search for carriage returns that backtracks took 7 s for 64 KiB, and held every other thread."""

    @distributed(gpus=1, timeout=3)
    def job() -> None:
        sys.stdout.write("y" * 2**19)
        time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(WorkersStalled, match="timeout=3 s"):
        job.distributed()
    assert time.monotonic() - begin < 3 + 5


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_what_a_rank_has_started_ends_with_it(raises: bool, tmp_path: Any) -> None:
    @distributed(gpus=1)
    def job() -> int:
        child = subprocess.Popen(["sleep", "600"])
        (tmp_path / "pid").write_text(str(child.pid))
        if raises:
            raise ValueError("at once")
        return child.pid

    with pytest.raises(ValueError, match="at once") if raises else contextlib.nullcontext():
        job.distributed()
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 3)


def test_three_launches_one_after_another_leave_nothing_behind(nothing_left: Any) -> None:
    @distributed(gpus=2)
    def job(number: int) -> int:
        return number + int(os.environ["RANK"])

    for number in range(3):
        assert job.distributed(number) == [number, number + 1]
        assert not nothing_left()


def test_signal_handlers_and_environment_of_the_kernel_are_as_before() -> None:
    @distributed(gpus=1)
    def job() -> None: ...

    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    environment = dict(os.environ)
    job.distributed()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == handlers
    assert dict(os.environ) == environment


def test_a_rank_that_prints_100_mb_neither_blocks_nor_floods_the_cell(
    capsys: pytest.CaptureFixture[str], run_folder: Any
) -> None:
    @distributed(gpus=2)
    def job() -> None:
        line = "x" * 999 + "\n"
        for _ in range(100):
            sys.stdout.write(line * 1000)
        print("the last line")

    job.distributed()
    shown = capsys.readouterr().out
    assert len(shown) < 2 * 2**20
    assert "all of it is in" in shown
    assert shown.rstrip().endswith("the last line")
    assert [path.stat().st_size > 10**8 for path in sorted(run_folder.glob("logs/*/rank*.log"))] == [
        True,
        True,
    ]


def test_what_cannot_be_pickled_is_refused_by_name_before_launch() -> None:
    lock = threading.Lock()

    @distributed(gpus=2)
    def job(argument: Any) -> Any:
        return lock, argument

    with pytest.raises(PayloadError, match=r"job: captured variable 'lock' \(lock\) cannot be pickled"):
        job.distributed(1)

    @distributed(gpus=2)
    def other(argument: Any) -> Any:
        return argument

    with pytest.raises(PayloadError, match=r"other: argument 'argument' \(generator\) cannot be pickled"):
        other.distributed(x for x in range(3))


def test_a_function_that_uses_torch_and_an_attribute_called_classes_can_be_carried() -> None:
    """cloudpickle takes the attribute for the submodule torch.classes, which it cannot pickle; torch.ops likewise."""

    @distributed(gpus=1)
    def job(shape: Any) -> Any:
        return torch.zeros(1).item() + shape.classes + shape.ops

    assert job.distributed(SimpleNamespace(classes=10, ops=1)) == [11.0]


def test_an_attribute_that_is_named_like_a_global_is_not_blamed() -> None:
    @distributed(gpus=1)
    def job(data: Any) -> Any:
        return data.pytestmark

    with pytest.raises(PayloadError, match="argument 'data'"):
        job.distributed(threading.Lock())


def test_what_is_larger_than_64_mib_is_refused_by_name_before_launch() -> None:
    table = torch.zeros(20 * 2**20)

    @distributed(gpus=2)
    def job() -> Any:
        return table.sum()

    with pytest.raises(PayloadError, match=r"captured variable 'table' \(Tensor of shape \(20971520,\)\) is larger"):
        job.distributed()


def test_fewer_gpus_than_asked_for_are_refused_by_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    @distributed(gpus=8)
    def job() -> None: ...

    begin = time.monotonic()
    with pytest.raises(local.NotEnoughGPUs, match=r"gpus=8 .* torch sees 1 GPU"):
        job.distributed()
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"gpus": 0}, "gpus=0"),
        ({"gpus": "2"}, "gpus='2'"),
        ({"gpus": True}, "gpus=True"),
        ({"timeout": -1}, "timeout=-1"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"on": "slurm"}, "on='slurm' is unknown"),
        ({"gpus": 2, "num_accelerators": 4}, "two names of one argument"),
    ],
)
def test_bad_arguments_are_refused_when_the_cell_is_defined(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        distributed(**arguments)(lambda: None)


def test_old_and_new_argument_names_and_overrides_mean_the_same() -> None:
    job = distributed(num_accelerators=2, accelerator_type="H100")(lambda: None)
    assert (job.job.gpus, job.job.gpu_type) == (2, "H100")
    assert job.with_overrides(num_accelerators=4, timeout=5).job.gpus == 4
    with pytest.raises(TypeError, match="no argument 'gpu'"):
        job.with_overrides(gpu=1)


def test_a_decorator_without_parentheses_is_explained() -> None:
    with pytest.raises(TypeError, match="needs parentheses"):

        @distributed
        def job() -> None: ...


def test_a_returned_value_that_cannot_be_pickled_is_told_by_its_type() -> None:
    @distributed(gpus=1)
    def job() -> Any:
        return (x for x in range(3))

    with pytest.raises(TypeError, match="returned a generator"):
        job.distributed()


def test_a_model_handed_back_by_ranks_that_trained_alone_fails() -> None:
    """Three frameworks silently train each rank alone on CPU and exit 0; the launcher compares the weights."""

    @distributed(gpus=2)
    def job() -> torch.nn.Module:
        place = ranks.init()
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.full((1, 2), 1.0 + place.rank)).sum().backward()
        optimizer.step()
        return model

    with pytest.raises(ranks.WeightsDiffer, match="first that differs is 'weight'"):
        job.distributed()


def test_a_model_handed_back_without_a_process_group_fails() -> None:
    @distributed(gpus=2)
    def job() -> torch.nn.Module:
        return torch.nn.Linear(2, 1)

    with pytest.raises(RuntimeError, match=r"never joined a process group.*trained alone"):
        job.distributed()


def test_a_rank_ends_as_an_interpreter_does(tmp_path: Any) -> None:
    """Ranks skip the destruction of modules at exit; their threads and exit handlers must not be skipped with it."""

    @distributed(gpus=2)
    def job(folder: Any) -> None:
        import atexit
        import threading
        import time

        def late() -> None:
            time.sleep(1)
            (folder / f"thread{place.rank}").touch()

        place = ranks.init()
        atexit.register((folder / f"handler{place.rank}").touch)
        threading.Thread(target=late).start()

    job.distributed(tmp_path)
    expected = {f"{kind}{rank}" for kind in ("thread", "handler") for rank in (0, 1)}
    assert {path.name for path in tmp_path.iterdir()} >= expected
