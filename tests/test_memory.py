"""The memory tracer against other ways of knowing: real tensors, torch's MemTracker, a process's resident memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from helpers import memory

ROOT = Path(__file__).parent.parent


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.work, x, use_reentrant=False)
        return self.work(x)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def residual(width: int = 256, depth: int = 4, checkpointed: bool = False) -> nn.Module:
    return nn.Sequential(*[Block(width, checkpointed) for _ in range(depth)], nn.Linear(width, 10))


def convolutions() -> nn.Module:
    features = (nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(64 * 20 * 20, 10))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 256), torch.zeros(rows, dtype=torch.long)


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 3, 24, 24), torch.zeros(rows, dtype=torch.long)


def loss(model: nn.Module, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(both[0]), both[1])


def adamw(parameters: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **options)


def frozen_but_last() -> nn.Module:
    model = residual()
    model[:-1].requires_grad_(False)
    return model


CASES = {
    "residual": (residual, batch, {}),
    "checkpointed": (lambda: residual(checkpointed=True), batch, {}),
    "mixed precision": (residual, batch, {"autocast": torch.bfloat16}),
    "accumulation": (residual, batch, {"accumulation": 4}),
    "kept gradients": (residual, batch, {"keep_gradients": True}),
    "frozen": (frozen_but_last, batch, {}),
    "convolutions": (convolutions, images, {}),
}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD])
def test_fake_tensors_are_accounted_as_real_ones_for_every_optimizer(optimizer: Any) -> None:
    fake, real = (memory.trace(residual, batch, loss, 512, optimizer=optimizer, fake=f) for f in (True, False))
    assert fake.total == pytest.approx(real.total, rel=0.01)
    assert fake.phase == real.phase


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_are_accounted_as_real_ones(name: str) -> None:
    build, make_batch, options = CASES[name]
    fake, real = (memory.trace(build, make_batch, loss, 256, optimizer=adamw, fake=f, **options) for f in (True, False))
    assert fake.total == pytest.approx(real.total, rel=0.01)
    for part in memory.CATEGORIES:
        assert fake.bytes[part] == pytest.approx(real.bytes[part], rel=0.01, abs=4096), part


@pytest.mark.parametrize("checkpointed", [False, True])
def test_full_fine_tuning_agrees_with_the_mem_tracker_of_torch(checkpointed: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    ours = memory.trace(lambda: residual(512, 6, checkpointed), wide_batch, loss, 1024, optimizer=torch.optim.AdamW)
    with FakeTensorMode():
        model, rows = residual(512, 6, checkpointed), wide_batch(1024)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *rows)
        with tracker:
            for step in range(2):
                loss(model, rows).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        (theirs,) = (
            by_part for device, by_part in tracker.get_tracker_snapshot("peak").items() if device.type == "cpu"
        )
    assert ours.total == pytest.approx(theirs["Total"], rel=0.02)


def wide_batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, 512), torch.zeros(rows, dtype=torch.long)


def test_resident_memory_of_a_real_run_is_what_was_traced() -> None:
    """The real step runs in a process of its own, which reports how far its resident memory rose above its start."""
    program = textwrap.dedent("""
        import json, resource, torch, psutil
        from torch import nn
        from helpers import memory

        def build():
            torch.manual_seed(0)
            parts = lambda: (nn.Linear(2048, 2048), nn.GELU(), nn.LayerNorm(2048), nn.GELU())
            return nn.Sequential(*[part for _ in range(8) for part in parts()], nn.Linear(2048, 10))

        def batch(rows):
            return torch.ones(rows, 2048), torch.zeros(rows, dtype=torch.long)

        def loss(model, both):
            return nn.functional.cross_entropy(model(both[0]), both[1])

        def optimizer(parameters):
            return torch.optim.AdamW(parameters, fused=True)

        planned = memory.trace(build, batch, loss, 1024, optimizer=optimizer)

        def train(model, both):
            stepper = optimizer(list(model.parameters()))
            for _ in range(2):
                loss(model, both).backward()
                stepper.step()
                stepper.zero_grad()

        train(nn.Sequential(nn.Linear(8, 10)), (torch.ones(4, 8), torch.zeros(4, dtype=torch.long)))  # load kernels
        before = psutil.Process().memory_info().rss
        train(build(), batch(1024))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"planned": planned.total, "resident": peak - before}))
    """)
    # Freed blocks go back to the system at once, as a tracer of live bytes assumes; glibc would keep some.
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    seen = json.loads(done.stdout)
    assert seen["planned"] > 0.5 * 2**30, "too small: the allocator's own noise would decide"
    assert seen["resident"] == pytest.approx(seen["planned"], rel=0.10)


def test_a_peak_is_made_of_what_the_model_and_the_optimizer_hold() -> None:
    count = sum(p.numel() for p in residual().parameters())
    peak = memory.trace(residual, batch, loss, 1, optimizer=lambda ps: torch.optim.AdamW(ps, fused=True))
    step = peak.moments["step//peak"]
    assert peak.parameters == peak.trainable == count
    assert step["weights"] == pytest.approx(4 * count, rel=0.01)
    assert step["gradients"] == pytest.approx(4 * count, rel=0.01)
    assert step["optimizer"] == pytest.approx(8 * count, rel=0.02)


def test_an_optimizer_that_leaves_foreach_open_gets_the_work_space_it_has_on_a_gpu() -> None:
    default, fused = (
        memory.trace(residual, batch, loss, 1, optimizer=lambda ps, o=options: torch.optim.AdamW(ps, **o))
        for options in ({}, {"fused": True})
    )
    weights = fused.moments["step//peak"]["weights"]
    assert default.moments["step//peak"]["temporary"] >= 0.99 * weights
    assert fused.moments["step//peak"]["temporary"] < 0.01 * weights


def test_checkpointing_trades_activations_away() -> None:
    plain, cheap = (
        memory.trace(lambda c=c: residual(256, 8, c), batch, loss, 4096, optimizer=adamw) for c in (False, True)
    )
    saved, kept = plain.moments["forward//peak"]["activations"], cheap.moments["forward//peak"]["activations"]
    assert kept < 0.35 * saved


def test_accumulation_keeps_gradients_alive_through_the_next_forward_pass() -> None:
    once, twice = (
        memory.trace(residual, batch, loss, 64, optimizer=adamw, accumulation=a).moments["forward//peak"]
        for a in (1, 2)
    )
    assert once["gradients"] == 0
    assert twice["gradients"] == pytest.approx(twice["weights"], rel=0.01)


def test_a_tied_weight_is_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(1000, 64), nn.Linear(64, 1000, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(tokens))

    peak = memory.trace(
        Tied,
        lambda rows: torch.zeros(rows, 8, dtype=torch.long),
        lambda model, tokens: model(tokens).float().sum(),
        2,
        optimizer=torch.optim.SGD,
    )
    assert peak.parameters == 64_000
    assert peak.bytes["weights"] == 256_000


def test_a_frozen_parameter_has_neither_gradient_nor_state() -> None:
    peak = memory.trace(frozen_but_last, batch, loss, 16, optimizer=adamw)
    assert peak.trainable == 256 * 10 + 10
    assert peak.moments["step//peak"]["optimizer"] < 0.01 * peak.bytes["weights"]


def test_reading_a_loss_for_the_log_does_not_stop_the_trace() -> None:
    def logged(model: nn.Module, both: Any) -> torch.Tensor:
        value = loss(model, both)
        print(f"{value.item():.3f}")
        return value

    assert memory.trace(residual, batch, logged, 4, optimizer=adamw).total > 0


def test_a_step_that_branches_on_values_is_refused_by_the_operator_that_needs_them() -> None:
    def picky(model: nn.Module, both: Any) -> torch.Tensor:
        rows = both[0]
        return model(rows[rows.sum(1) > 0]).sum()

    with pytest.raises(memory.CannotTrace, match=r"forward pass needs the values.*(nonzero|index)"):
        memory.trace(residual, batch, picky, 4, optimizer=adamw)


def test_nothing_to_train_and_an_empty_micro_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        memory.trace(lambda: residual().requires_grad_(False), batch, loss, 4, optimizer=adamw)
    with pytest.raises(ValueError, match="micro_batch=0"):
        memory.trace(residual, batch, loss, 0, optimizer=adamw)


def test_tracing_allocates_no_weights() -> None:
    """Sixteen billion parameters, which no test machine holds."""
    huge = memory.trace(
        lambda: residual(8192, 30), lambda rows: (torch.zeros(rows, 8192), batch(rows)[1]), loss, 2, optimizer=adamw
    )
    assert huge.parameters > 16e9
    assert huge.total > 4 * 4 * 16e9
