"""Checkpoints: exact resume, kills at random moments, damaged files, full disks, other world sizes."""

import contextlib
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import checkpoint
from helpers.checkpoint import CheckpointError, WorldSizeDiffers, newest, resume, save

pytestmark = pytest.mark.timeout(400)  # the first one starts all jobs of two ranks

ROOT = Path(__file__).resolve().parents[1]

# One interpreter that has imported everything forks its two ranks, so that a job costs milliseconds to start.
DRIVER = '''
import json, os, random, signal, sys, time, warnings
from pathlib import Path
import numpy, torch, torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import torch._dynamo
from helpers import checkpoint
torch.set_num_threads(1)
ROOM = Path(sys.argv[1])

def start(work, *arguments):
    """Two forked gloo ranks that call work(*arguments); returns their process ids and result files."""
    store = ROOM / f"store-{time.monotonic_ns()}"
    def rank(number):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
        result = work(number, *arguments)
        (ROOM / f"{store.name}-{number}").write_text(json.dumps(result))
        dist.barrier()
    pids = []
    for number in range(2):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                rank(number); code = 0
            except BaseException:
                import traceback; traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    return pids, [ROOM / f"{store.name}-{number}" for number in range(2)]

def finish(started):
    pids, results = started
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0], codes
    return [json.loads(path.read_text()) for path in results]

def train(rank, folder, until, every=1, leave_at=None):
    """DDP with dropout, shuffled data and a schedule: what each rank saw and drew, and the weights at the end."""
    torch.manual_seed(100 + rank); numpy.random.seed(rank); random.seed(rank)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        inside = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Dropout(0.5), torch.nn.Linear(512, 8))
        data = TensorDataset(torch.randn(44, 64), torch.arange(44))
    model = DistributedDataParallel(inside)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "batch": 0}
    step = begun = checkpoint.resume(folder, state)
    seen = []
    while step < until:
        sampler.set_epoch(state["epoch"])
        for x, index in checkpoint.remaining(loader, state["batch"]):
            loss = (model(x) - index[:, None]).square().mean()
            loss.backward(); optimizer.step(); optimizer.zero_grad(); scheduler.step()
            step += 1; state["batch"] += 1
            draws = [random.random(), numpy.random.rand(), torch.rand(()).item()]
            seen.append([step, index.tolist(), loss.item(), draws])
            if step % every == 0 or step == until:
                checkpoint.save(folder, state, step=step, keep=2)
            if step == leave_at or step == until:
                break
        else:
            state["epoch"] += 1; state["batch"] = 0
        if step == leave_at:
            break
    weights = [p.double().sum().item() for p in model.parameters()]
    return {"begun": begun, "seen": seen, "weights": weights, "rate": scheduler.get_last_lr()}
'''


SCENARIOS = """
def resumed():
    whole = finish(start(train, ROOM / "whole", 17, 100))
    first = finish(start(train, ROOM / "parts", 17, 4, 10))  # 8 is the last saved; 6 batches make an epoch
    return whole, first, finish(start(train, ROOM / "parts", 17, 100))

def killed():
    folder, chance = ROOM / "killed", random.Random(1)
    finish(start(train, folder, 1))
    floor, rounds, amid = 1, [], 0
    for _ in range(12):
        before = set(folder.iterdir())
        pids, _ = start(train, folder, 10_000)
        while set(folder.iterdir()) == before:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.2))
        chance.shuffle(pids)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.02))
        for pid in pids:
            os.waitpid(pid, 0)
        amid += bool(list(folder.glob(".writing-*")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = int(checkpoint.newest(folder).name.split("-")[3])
        assert step >= floor, (step, floor)
        floor = step
        rounds.append(step)
    ended = finish(start(train, folder, floor + 3))
    whole = finish(start(train, ROOM / "undisturbed", floor + 3, 10_000))
    return rounds, amid, ended, whole, len(list(folder.iterdir()))

class Cursor:
    def __init__(self, at): self.at = at
    def state_dict(self): return {"at": self.at}
    def load_state_dict(self, state): self.at = state["at"]

def work(rank):
    model = torch.nn.Linear(64, 64)
    model.register_buffer("running", torch.full((2000,), float(rank)))
    DistributedDataParallel(model)  # rank 0's weights and buffers on both
    model.running.fill_(rank + 10)
    checkpoint.save(ROOM / "alike", {"model": model, "note": "both"}, step=5)
    checkpoint.save(ROOM / "own", {"model": model}, step=6, per_rank={"cursor": Cursor(rank)})
    cursor = Cursor(None)
    checkpoint.resume(ROOM / "own", {"model": model}, per_rank={"cursor": cursor})

    bad = object() if rank == 1 else 1
    try:
        checkpoint.save(ROOM / "own", {"model": model}, step=7, per_rank={"cursor": bad})
        failed = "nothing"
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"

    torch.manual_seed(0)
    sharded = torch.nn.Sequential(torch.nn.Linear(65, 129), torch.nn.Tanh(), torch.nn.Linear(129, 7))
    fully_shard(sharded)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1)
    x = torch.ones(2, 65)
    def step():
        sharded(x).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    step(); step()
    checkpoint.save(ROOM / "sharded", {"model": sharded, "optimizer": optimizer}, step=2)
    step()
    return [cursor.at, failed, sharded(x).sum().item()]

answers = {"resumed": resumed(), "killed": killed(), "two_ranks": finish(start(work))}
(ROOM / "answers.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def driven(tmp_path_factory) -> dict[str, Any]:
    """What the two ranks did in all scenarios; one interpreter, because importing takes longer than they do."""
    room = tmp_path_factory.mktemp("driven")
    (room / "driver.py").write_text(DRIVER + SCENARIOS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(room / "driver.py"), str(room)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((room / "answers.json").read_text()) | {"room": room}


def test_a_resumed_job_repeats_data_losses_and_random_draws_of_every_rank_bit_for_bit(driven):
    whole, _, rest = driven["resumed"]
    for rank in range(2):
        assert rest[rank]["begun"] == 8  # in the middle of the second epoch
        assert rest[rank]["seen"] == whole[rank]["seen"][8:]
        assert rest[rank]["weights"] == whole[rank]["weights"]
        assert rest[rank]["rate"] == whole[rank]["rate"]
    assert whole[0]["seen"] != whole[1]["seen"]


def test_a_wrapped_model_is_saved_as_the_one_inside(driven):
    saved = torch.load(newest(driven["room"] / "whole") / "objects.pt", weights_only=True)["model"]
    assert list(saved) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_kill_at_any_moment_leaves_a_loadable_newest_checkpoint_and_the_end_is_that_of_an_undisturbed_job(driven):
    steps, amid, ended, whole, left = driven["killed"]
    assert amid >= 3, f"only {amid} of 12 kills fell into a save"
    assert steps[-1] > 5
    assert left == 2  # keep=2, and nothing else stays
    for rank in range(2):
        assert ended[rank]["seen"] == whole[rank]["seen"][steps[-1] :]
        assert ended[rank]["weights"] == whole[rank]["weights"]


@pytest.fixture
def two_ranks(driven) -> tuple[Path, Any]:
    return driven["room"], driven["two_ranks"]


def test_each_rank_gets_its_own_state_back(two_ranks):
    assert [cursor for cursor, _, _ in two_ranks[1]] == [0, 1]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_earlier_one(two_ranks):
    room, ((_, first, _), (_, second, _)) = two_ranks
    assert first.startswith("CheckpointError: saving to")
    assert "failed on rank 1: TypeError: 'cursor' holds something that is not plain data" in first
    assert second.startswith("TypeError: 'cursor' holds something that is not plain data")
    assert newest(room / "own").name == "save-000001-step-6"


def test_state_that_ranks_hold_alike_is_accepted_by_another_world_size_and_buffers_are_rank_zeros(two_ranks):
    model = torch.nn.Linear(64, 64)
    model.register_buffer("running", torch.zeros(2000))
    state = {"model": model, "note": None}
    with pytest.warns(RuntimeWarning, match=r"saved by 2 ranks and this job has 1: .*random streams"):
        assert resume(two_ranks[0] / "alike", state) == 5
    assert state["note"] == "both"
    assert model.running.unique().tolist() == [10.0]


def test_state_of_each_rank_is_refused_by_another_world_size_with_the_reason(two_ranks):
    with pytest.raises(WorldSizeDiffers, match=r"2 ranks and this job has 1: .*\(cursor\) cannot be shared out"):
        resume(two_ranks[0] / "own", {"model": torch.nn.Linear(64, 64)}, per_rank={"cursor": 0})
    with pytest.raises(WorldSizeDiffers, match="it must be equal"):
        resume(two_ranks[0] / "alike", {"model": None, "note": None}, world_size="fixed")


def test_sharded_parameters_and_moments_are_cut_anew_for_another_world_size(two_ranks):
    room, ((_, _, expected), _) = two_ranks
    model = torch.nn.Sequential(torch.nn.Linear(65, 129), torch.nn.Tanh(), torch.nn.Linear(129, 7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match="this job has 1"):
        assert resume(room / "sharded", {"model": model, "optimizer": optimizer}) == 2
    x = torch.ones(2, 65)
    model(x).square().mean().backward()
    optimizer.step()
    assert model(x).sum().item() == pytest.approx(expected, abs=1e-5)


# --- one process, no process group ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "checkpoints"


def job(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    mine, theirs = one["model"].state_dict(), other["model"].state_dict()
    return one["epoch"] == other["epoch"] and all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_without_a_checkpoint_resume_returns_zero_and_touches_nothing(folder):
    state = job()
    draws = torch.get_rng_state()
    assert resume(folder / "none", state) == 0
    assert newest(folder / "none") is None
    assert same(state, job())
    assert torch.equal(draws, torch.get_rng_state())


def test_python_numpy_and_torch_continue_their_random_streams(folder):
    import numpy

    def draw() -> list[float]:
        return [random.random(), float(numpy.random.rand()), torch.rand(()).item(), float(numpy.random.randn())]

    draw()
    save(folder, {"epoch": 1}, step=1)
    expected = draw()
    draw()
    resume(folder, {"epoch": 0})
    assert draw() == expected


FILES = [".metadata", "__0_0.distcp", "manifest.json", "objects.pt", "rank-0.pt"]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


HARMS = [(harm, name) for name in FILES for harm in (truncate, flip, Path.unlink)]
HARMS.remove((flip, "manifest.json"))  # it holds the digests and has none of its own


@pytest.mark.parametrize(("harm", "name"), HARMS)
def test_a_damaged_checkpoint_is_skipped_with_a_warning_that_names_the_file(folder, harm, name):
    good = job(1)
    save(folder, good, step=1)
    damaged = save(folder, job(2), step=2)
    assert sorted(path.name for path in damaged.iterdir()) == FILES
    harm(damaged / name)
    state = job(3)
    with pytest.warns(RuntimeWarning, match=f"skipping a damaged checkpoint: .*step-2/{name}"):
        assert resume(folder, state) == 1
    assert same(state, good)
    with pytest.warns(RuntimeWarning, match=name):
        assert newest(folder).name == "save-000001-step-1"


def test_when_every_checkpoint_is_damaged_resume_refuses_to_start_from_zero(folder):
    truncate(save(folder, job(), step=1) / "rank-0.pt")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        resume(folder, job())


def test_the_last_k_stay_and_a_damaged_one_does_not_count(folder):
    for step in range(1, 6):
        save(folder, {"epoch": step}, step=step, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["save-000004-step-4", "save-000005-step-5"]
    truncate(folder / "save-000005-step-5" / "objects.pt")
    save(folder, {"epoch": 6}, step=6, keep=2)
    assert {path.name[-1] for path in folder.iterdir()} == {"4", "5", "6"}
    save(folder, {"epoch": 7}, step=7, keep=1)
    assert [path.name for path in folder.iterdir()] == ["save-000007-step-7"]
    with pytest.raises(ValueError, match="keep at least 1"):
        save(folder, {"epoch": 8}, step=8, keep=0)


def test_the_newest_is_what_was_saved_last_even_when_an_abandoned_run_got_further(folder):
    """Ordering by step would resume the abandoned run, and keep=1 would delete the new checkpoint at once."""
    save(folder, {"epoch": 9}, step=900, keep=1)
    save(folder, {"epoch": 1}, step=100, keep=1)
    state = {"epoch": 0}
    assert resume(folder, state) == 100
    assert state["epoch"] == 1


def big(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": torch.nn.Linear(512, 1024)}  # 2 MiB


def full_by_limit(folder: Path) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def limit() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit()


def test_a_file_that_cannot_be_written_to_its_end_is_a_clear_error_and_the_previous_checkpoint_stays(folder):
    save(folder, big(1), step=1)
    with full_by_limit(folder), pytest.raises(CheckpointError, match=r"failed on rank 0: .*MiB are free"):
        save(folder, big(2), step=2)
    assert [path.name for path in folder.iterdir()] == ["save-000001-step-1"]
    assert resume(folder, big(3)) == 1


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small tmpfs cannot be mounted here: {error}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_a_clear_error_its_space_is_freed_and_the_previous_checkpoint_stays(small_disk):
    save(small_disk, big(1), step=1)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"failed on rank 0: .*MiB are free there now; earlier"):
            save(small_disk, big(2), step=2)
    state, expected = big(3), big(1)
    assert resume(small_disk, state) == 1
    assert torch.equal(state["model"].weight, expected["model"].weight)


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", ["objects.pt", "rank-0.pt", ".metadata"])
def test_code_in_a_checkpoint_is_not_run(tmp_path, folder, name):
    path = save(folder, job(), step=1)
    trap = Trap(tmp_path / "sprung")
    if name == ".metadata":
        (path / name).write_bytes(pickle.dumps(trap))
    else:
        torch.save({"epoch": trap, "model": {}, "optimizer": {}}, path / name)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = [(path / name).stat().st_size, checkpoint._digest(path / name)]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises((CheckpointError, pickle.UnpicklingError)):
        resume(folder, job())
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("value", [object(), lambda: None, {"deep": [Path("x")]}])
def test_what_is_not_plain_data_is_refused_by_name_when_saving(folder, value):
    with pytest.raises(TypeError, match="'odd' holds something that is not plain data"):
        save(folder, {"epoch": 1, "odd": value}, step=1)
    assert newest(folder) is None


def test_files_hold_each_tensor_once_and_little_else(folder):
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(1000, 256)
            self.head = torch.nn.Linear(256, 1000, bias=False)
            self.head.weight = self.embedding.weight

    model, view = Tied(), torch.randn(1000, 256)[:1]
    path = save(folder, {"model": model, "view": view}, step=1)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert size < 1.03 * model.head.weight.nbytes
    other = {"model": Tied(), "view": torch.zeros(1)}
    resume(folder, other)
    assert torch.equal(other["model"].head.weight, model.embedding.weight)
    assert torch.equal(other["view"], view)


def test_an_optimizer_that_has_not_stepped_is_left_alone_and_comes_back_as_it_was(folder):
    """torch's get_optimizer_state_dict takes a dummy step first, which leaves Adam's step count at 1."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    save(folder, {"optimizer": optimizer}, step=0)
    assert not optimizer.state
    assert resume(folder, {"optimizer": optimizer}) == 0
    assert not optimizer.state


def test_names_and_shapes_that_do_not_fit_are_refused_before_anything_changes(folder):
    save(folder, job(1), step=1)
    state = job(2)
    with pytest.raises(CheckpointError, match=r"holds \['epoch', 'model', 'optimizer'\] as state"):
        resume(folder, {"model": state["model"]})
    with pytest.raises(CheckpointError, match=r"weight is \(64, 32\) in the model and \(64, 64\) when saved"):
        resume(folder, state | {"model": torch.nn.Linear(32, 64)})
    with pytest.raises(CheckpointError, match=r"the model lacks bias \(1 in all\)"):
        resume(folder, state | {"model": torch.nn.Linear(64, 64, bias=False)})
    assert same(state, job(2))


def test_several_ranks_without_a_process_group_are_refused(folder, monkeypatch):
    """Each of them would write to the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        save(folder, {"epoch": 1}, step=1)


def test_a_shorter_epoch_than_was_seen_is_an_error():
    assert list(checkpoint.remaining([1, 2, 3], 1)) == [2, 3]
    with pytest.raises(ValueError, match="cannot skip 4 batches: the epoch has 3"):
        list(checkpoint.remaining([1, 2, 3], 4))


def test_a_save_warns_of_nothing(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(folder, job(), step=1)
        resume(folder, job())
