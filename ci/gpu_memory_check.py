"""Hold the planner against a GPU: peak memory as traced on fake tensors, and as torch.cuda measures the same steps.

    python ci/gpu_memory_check.py            # exit code 0: all within 5 %; 1: not; 77: no GPU, nothing was checked

Three cases, each a real training step with random weights: a plain module in fp32 (AdamW as torch picks it on a GPU),
a small language model fully fine-tuned in bf16 with gradient checkpointing, and LoRA on a frozen bf16 base. Needs
torch with CUDA, transformers and peft; about 8 GiB on the card; a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from helpers import memory
from helpers.fit import configs
from helpers.fit.plan import Plan

TOLERANCE = 0.05
NO_GPU = 77
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One training step: what helpers.memory.trace takes."""

    name: str
    build: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss_fn: Callable[[nn.Module, Any], torch.Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    micro_batch: int


def cases() -> list[Case]:
    def wide() -> nn.Module:
        layers = [layer for _ in range(8) for layer in (nn.Linear(4096, 4096), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(4096, 10))

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 4096), torch.zeros(count, dtype=torch.long)

    def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def language(name: str, model: str, micro_batch: int, **options: Any) -> Case:
        plan = Plan(configs.load(model), sequence=1024, packing=True, **options)
        return Case(
            name,
            lambda: plan.build(torch.bfloat16),
            plan.make_batch,
            lambda model, batch: model(**batch).loss,
            plan.make_optimizer,
            micro_batch,
        )

    return [
        Case("plain module, fp32", wide, rows, cross_entropy, torch.optim.AdamW, 8192),
        language("smollm2-135m, full, checkpointing", "smollm2-135m", 8),
        language("llama-3.2-1b, LoRA rank 16", "llama-3.2-1b", 2, lora=16, checkpointing=False),
    ]


def measure(case: Case) -> int:
    """Peak bytes of the second and third step on the GPU (the first loads kernels and makes the optimizer's state)."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        model = case.build()
    batch = tree_map_only(torch.Tensor, lambda t: t.cuda(), case.make_batch(case.micro_batch))
    model.train()
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats()
        case.loss_fn(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_memory_check: no GPU here, nothing was checked")
        return NO_GPU
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'case':<36}{'planned GiB':>12}{'measured GiB':>14}{'difference':>12}")
    failed = 0
    for case in cases():
        planned = memory.trace(
            case.build, case.make_batch, case.loss_fn, case.micro_batch, optimizer=case.optimizer
        ).total
        measured = measure(case)
        apart = planned / measured - 1
        failed += abs(apart) > TOLERANCE
        print(f"{case.name:<36}{planned / GIB:>12.2f}{measured / GIB:>14.2f}{apart:>+12.1%}")
    print(
        "gpu_memory_check:", f"{failed} of 3 cases are more than {TOLERANCE:.0%} apart" if failed else "all within 5 %"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
