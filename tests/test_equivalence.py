"""N ranks against one process: an honest run agrees, and every fault that people really make is caught by name."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from helpers import distributed, ranks
from helpers.equivalence import Equivalence, NotEquivalent, Trace, compare, tolerance

SAMPLES, HELD_OUT, LONGEST = 64, 31, 9
FAULTS = {
    "mean of micro-batch means": r"first (loss|gradient norm).*(uneven|normalised differently)",
    "no set_epoch": r"every epoch has the same order on 2 rank\(s\) \(set_epoch is not called",
    "padding counted": r"2 ranks count 32 evaluation samples and one rank 31 \(padding is counted\)",
    "parameter left out of DDP": r"end with different weights .*; the first that differs is '2.bias'",
    "seed by rank": r"start from different weights",
    "learning rate times world size": r"first step agrees and later ones part \(weights moved 1\.9\d* times as far\)",
    "loss of rank 0 only": r"report different losses",
    "sampler not by rank": r"step 1 on 2 ranks holds other samples",
    "one dropout stream": r"all ranks draw the same dropout masks in '3'",
}
REASONS = {
    "BatchNorm not synchronised": r"differ as expected: BatchNorm '1' takes its statistics from each rank's own",
    "dropout": r"differ as expected: dropout '3' draws other masks",
}


@dataclass(frozen=True)
class Settings:
    gpus: int = 2
    micro_batch: int = 4
    accumulation: int = 2

    def replace(self, **changes: int) -> "Settings":
        return replace(self, **changes)


def train(settings: Settings, fault: str = "") -> dict[str, Any]:
    """Sequences of uneven length; the loss is a mean over the tokens of the global batch."""
    seed = 0 if fault == "one dropout stream" else 3
    place = ranks.init(seed=seed)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, LONGEST, 4, generator=generator)
    targets = inputs.sum(-1, keepdim=True).sin()
    lengths = torch.randint(1, LONGEST + 1, (SAMPLES,), generator=generator)
    data = TensorDataset(torch.arange(SAMPLES), inputs, targets, lengths)

    torch.manual_seed(place.rank if fault == "seed by rank" else 0)
    middle = torch.nn.BatchNorm1d(LONGEST) if fault == "BatchNorm not synchronised" else torch.nn.Identity()
    dropout = torch.nn.Dropout(0.5 if "dropout" in fault else 0.0)
    parts = (torch.nn.Linear(4, 16), middle, torch.nn.Linear(16, 16), dropout, torch.nn.Tanh(), torch.nn.Linear(16, 1))
    model = torch.nn.Sequential(*parts)
    if fault == "parameter left out of DDP":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    ddp = DistributedDataParallel(model, init_sync=fault != "seed by rank")
    ranks.seed_everything(seed, 0 if fault == "one dropout stream" else place.rank)
    rate = 0.01 * (place.world_size if fault == "learning rate times world size" else 1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=rate, weight_decay=0.0)
    by_rank = {"rank": place.rank, "num_replicas": place.world_size}
    sampler = DistributedSampler(
        data, seed=9, **(by_rank if fault != "sampler not by rank" else {"rank": 0, "num_replicas": place.world_size})
    )
    loader = DataLoader(data, batch_size=settings.micro_batch, sampler=sampler)
    trace = Trace(ddp)

    for epoch in range(3):
        if fault != "no set_epoch":
            sampler.set_epoch(epoch)
        batches = list(loader)
        for first in range(0, len(batches), settings.accumulation):
            group = batches[first : first + settings.accumulation]
            own_tokens = sum(int(lengths.sum()) for *_, lengths in group)
            all_tokens = ranks.all_mean(own_tokens) * place.world_size
            total = 0.0
            for number, (_, x, y, length) in enumerate(group):
                mask = (torch.arange(LONGEST) < length[:, None]).unsqueeze(-1)
                ddp.require_backward_grad_sync = number == len(group) - 1
                summed = ((ddp(x) - y).square() * mask).sum()
                if fault == "mean of micro-batch means":
                    loss = summed / mask.sum() / len(group)
                    total += loss.item() / place.world_size
                else:  # DDP averages gradients over ranks, so the sum is scaled back up
                    loss = summed / all_tokens * place.world_size
                    total += summed.item() / all_tokens
                loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
            shown = total if fault == "loss of rank 0 only" else ranks.all_mean(total) * place.world_size
            trace.step(shown, norm.item(), torch.cat([ids for ids, *_ in group]).tolist(), epoch)

    mine = list(DistributedSampler(range(HELD_OUT), shuffle=False, **by_rank))
    exact = range(place.rank, HELD_OUT, place.world_size)
    return trace.finish(evaluated=len(mine if fault == "padding counted" else exact))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, list[dict[str, Any]]]]:
    """Every variant on one rank (in this process) and on two (one launch for all of them)."""
    names = ["", *FAULTS, *REASONS]

    @distributed(gpus=2)
    def all_variants() -> dict[str, dict[str, Any]]:
        return {name: train(Settings(), name) for name in names}

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GALLERY_RUN_DIR", str(tmp_path_factory.mktemp("run")))
        two = all_variants.distributed()
    one = {name: train(Settings(gpus=1, micro_batch=16, accumulation=1), name) for name in names}
    ranks.shut_down()
    return {name: {1: [one[name]], 2: [value[name] for value in two]} for name in names}


class Recorded:
    """Stands where a @distributed function stands, and returns runs that were made before."""

    def __init__(self, runs: dict[int, list[dict[str, Any]]], gpus: int = 0) -> None:
        self.runs, self.gpus = runs, gpus

    def with_overrides(self, gpus: int) -> "Recorded":
        return Recorded(self.runs, gpus)

    def distributed(self, settings: Settings) -> list[dict[str, Any]]:
        assert settings.gpus * settings.micro_batch * settings.accumulation == 16
        assert (settings.gpus, settings.accumulation) in {(1, 1), (2, 2)}
        return self.runs[self.gpus]


def outcome(traces: dict[str, Any], name: str) -> Equivalence:
    return compare(Recorded(traces[name]), Settings(), check=False)


def test_an_honest_run_is_the_same_training_on_one_and_two_ranks(traces: dict[str, Any]) -> None:
    found = compare(Recorded(traces[""]), Settings())
    assert found.equal
    assert "the same training: over 12 steps" in found.verdict
    assert 0 < found.worst_loss < found.tolerance
    assert found.weight_distance < found.tolerance


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_and_named(traces: dict[str, Any], fault: str) -> None:
    with pytest.raises(NotEquivalent, match=f"(?s)are not the same training: .*{FAULTS[fault]}"):
        compare(Recorded(traces[fault]), Settings())


@pytest.mark.parametrize("reason", REASONS)
def test_a_difference_with_a_reason_is_reported_with_it_and_does_not_fail(traces: dict[str, Any], reason: str) -> None:
    found = compare(Recorded(traces[reason]), Settings())
    assert not found.equal
    assert re.search(REASONS[reason], found.verdict), found.verdict


def test_the_tolerance_lies_between_rounding_and_the_smallest_fault(traces: dict[str, Any]) -> None:
    """A bound that honest runs reach, or that faults stay under, would prove nothing."""
    honest = outcome(traces, "")
    smallest = min(
        max(found.worst_loss, found.weight_distance)
        for found in (outcome(traces, name) for name in ("mean of micro-batch means", "learning rate times world size"))
    )
    assert max(honest.worst_loss, honest.weight_distance) * 5 < honest.tolerance < smallest / 5


def test_the_tolerance_follows_the_dtype_the_batch_and_the_steps() -> None:
    base = tolerance(torch.float32, 16, 12)
    assert tolerance(torch.float64, 16, 12) / base == pytest.approx(2.0**-29)
    assert tolerance(torch.bfloat16, 16, 12) > 100 * base
    assert tolerance(torch.float32, 64, 12) == pytest.approx(2 * base)


def test_a_bound_is_never_so_loose_that_nothing_could_fail() -> None:
    assert tolerance(torch.bfloat16, 4096, 1000) == 0.05


@pytest.mark.parametrize("fault", ["a weight that is not a number", "weights that never moved"])
def test_a_training_that_went_nowhere_proves_nothing(traces: dict[str, Any], fault: str) -> None:
    runs = {size: [dict(trace) for trace in by_rank] for size, by_rank in traces[""].items()}
    for trace in (each for by_rank in runs.values() for each in by_rank):
        if fault == "weights that never moved":
            trace["final"] = trace["initial"]
    if fault == "a weight that is not a number":
        runs[1][0]["final"] = {name: tensor * float("nan") for name, tensor in runs[1][0]["final"].items()}
    with pytest.raises(NotEquivalent):
        compare(Recorded(runs), Settings())


def test_dropout_does_not_excuse_weights_that_move_twice_as_far(traces: dict[str, Any]) -> None:
    runs = {size: [dict(trace) for trace in by_rank] for size, by_rank in traces["dropout"].items()}
    for trace in runs[2]:
        trace["final"] = {name: 2 * trace["final"][name] - trace["initial"][name] for name in trace["final"]}
    with pytest.raises(NotEquivalent, match="more than BatchNorm or dropout explain"):
        compare(Recorded(runs), Settings())


def test_compare_launches_the_function_itself_and_shows_table_and_picture() -> None:
    found = compare(distributed(gpus=2)(train), Settings())
    assert found.equal
    assert [row["step"] for row in found.table(3)] == [1, 7, 12]
    assert "<table>" in found._repr_html_()
    assert found.plot().axes[0].get_xlabel() == "optimizer step"


def test_what_cannot_be_compared_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"global batch of 18 does not divide into 4 ranks"):
        compare(Recorded({}), Settings(gpus=2, micro_batch=9, accumulation=1), world_sizes=(1, 4))
    with pytest.raises(TypeError, match="returned float without a trace"):
        compare(Recorded({1: [0.5]}), Settings())  # type: ignore[list-item]
