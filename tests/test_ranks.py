"""Ranks and collectives, on two real gloo processes and in one process without any job."""

import os
import random
from datetime import timedelta
from typing import Any

import pytest
import torch

from helpers import distributed, ranks
from helpers.launch import WorkersStalled


def test_without_a_job_there_is_one_rank_and_collectives_return_their_own_value() -> None:
    assert (ranks.rank(), ranks.world_size(), ranks.local_rank()) == (0, 1, 0)
    assert ranks.all_mean(3.0, weight=5) == 3.0
    assert ranks.gather("a") == ["a"]
    assert ranks.equal_batches([1, 2, 3]) == 3
    ranks.barrier("nothing to wait for")


def test_init_without_a_launcher_makes_a_job_of_one_that_ddp_accepts() -> None:
    place = ranks.init()
    try:
        assert (place.rank, place.world_size) == (0, 1)
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    finally:
        ranks.shut_down()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR is not"),
    ],
)
def test_a_broken_environment_is_told_by_variable_and_value(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ranks.RankEnvironmentError, match=told):
        ranks.init()


def test_an_unknown_backend_and_nccl_without_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="backend='mpi' is unknown"):
        ranks.init("mpi")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="backend='nccl' needs a GPU for each of this node's 1 ranks"):
            ranks.init("nccl")


def test_two_ranks_agree_on_means_gathers_and_wrapped_weights_and_differ_in_seeds() -> None:
    @distributed(gpus=2)
    def job() -> dict[str, Any]:
        place = ranks.init(seed=5)
        drawn = random.random(), torch.rand(()).item()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))  # rank 0's weights for both
        plain = ranks.same_weights(model.module)
        model(torch.full((1, 2), 1.0 + place.rank)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        shown = ranks.on_rank_zero(lambda: "from zero")()
        return {
            "weighted": ranks.all_mean(10.0 * place.rank, weight=1 + 2 * place.rank),
            "gathered": ranks.gather({"rank": place.rank}),
            "hashes": (plain, ranks.same_weights(model), ranks.same_weights(model.module)),
            "drawn": drawn,
            "shown": shown,
            "threads": torch.get_num_threads(),
        }

    first, second = job.distributed()
    assert first["weighted"] == second["weighted"] == pytest.approx((0 * 1 + 10 * 3) / 4)
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert first["hashes"] == second["hashes"]
    before, wrapped, unwrapped = first["hashes"]
    assert wrapped == unwrapped != before
    assert first["drawn"] != second["drawn"]
    assert (first["shown"], second["shown"]) == ("from zero", None)
    assert first["threads"] == max(1, (os.cpu_count() or 1) // 2)
    ranks.seed_everything(5)
    assert (random.random(), torch.rand(()).item()) == first["drawn"], "rank 0 draws as a job of one would"


@pytest.mark.parametrize("fault", ["batches", "barrier", "weights"])
def test_the_rank_that_differs_is_named(fault: str) -> None:
    @distributed(gpus=2)
    def job() -> None:
        place = ranks.init()
        if fault == "batches":
            ranks.equal_batches(range(10 + place.rank))
        elif fault == "weights":
            model = torch.nn.Linear(2, 1)
            with torch.no_grad():
                model.weight.fill_(1.0)
                model.bias.fill_(float(place.rank))
            ranks.same_weights(model)
        elif place.rank == 0:
            ranks.barrier("evaluation", timeout=timedelta(seconds=1))

    error, told = {
        "batches": (ranks.UnequalBatches, r"(?s)rank 0: 10\n.*rank 1: 11"),
        "barrier": (
            (ranks.RankLate, WorkersStalled),
            "(?i)evaluation: not every rank arrived within 1 s.*rank.* 1",
        ),
        "weights": (ranks.WeightsDiffer, "first that differs is 'bias'"),
    }[fault]
    with pytest.raises(error, match=told):
        job.distributed()


def test_a_loader_without_a_length_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="generator has no length"):
        ranks.equal_batches(x for x in range(3))
