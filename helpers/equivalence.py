"""Is a run on N ranks the same training as one process at equal global batch? Losses, gradients, weights, samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from helpers.differences import (
    distance,
    norm,
    rank_faults,
    reasons,
    relative,
    sample_faults,
    too_far,
    where_they_part,
)
from helpers.trace import Trace

__all__ = ["Equivalence", "NotEquivalent", "Trace", "compare", "tolerance"]

SAFETY = 10.0
LOOSEST = 0.05  # a bound above this, as bfloat16 would have, could not fail


class NotEquivalent(AssertionError):
    """The N-rank run is a different training: the message says where they part and what usually causes it."""


@dataclass(frozen=True)
class Equivalence:
    """The outcome of `compare`. `.faults` are differences that should not be, `.expected` those with a reason.

    worst_loss: the largest relative difference of a step's loss; worst_gradient_norm: likewise; weight_distance: the
    L2 distance of the final weights relative to how far training moved them; tolerance: the bound on each.
    """

    world_sizes: tuple[int, ...]
    global_batch: int
    losses: dict[int, list[float]]
    gradient_norms: dict[int, list[float]]
    worst_loss: float
    worst_gradient_norm: float
    weight_distance: float
    tolerance: float
    faults: tuple[str, ...]
    expected: tuple[str, ...]

    @property
    def equal(self) -> bool:
        return not self.faults and not self.expected

    @property
    def verdict(self) -> str:
        """One sentence for the reader."""
        sizes = " and ".join(f"{size} rank{'s' * (size > 1)}" for size in self.world_sizes)
        if self.faults:
            return f"{sizes} are not the same training: " + "; ".join(self.faults)
        if self.expected:
            return f"{sizes} differ as expected: " + "; ".join(self.expected)
        return (
            f"{sizes} at global batch {self.global_batch} are the same training: over {len(self.losses[1])} steps "
            f"losses agree within {self.worst_loss:.1e}, gradient norms within {self.worst_gradient_norm:.1e}, final "
            f"weights within {self.weight_distance:.1e} (bound {self.tolerance:.1e})."
        )

    def table(self, rows: int = 6) -> list[dict[str, float]]:
        """Some steps, evenly spread: step, the loss at each world size, and the relative difference."""
        steps = len(self.losses[1])
        chosen = sorted({round(index * (steps - 1) / max(1, rows - 1)) for index in range(min(rows, steps))})
        return [
            {"step": step + 1}
            | {f"loss, {size} rank{'s' * (size > 1)}": self.losses[size][step] for size in self.world_sizes}
            | {"relative difference": max(relative(self.losses[size][step], self.losses[1][step])
                                          for size in self.world_sizes)}
            for step in chosen
        ]  # fmt: skip

    def plot(self) -> Any:
        """A matplotlib Figure: the losses over each other, and their difference against the bound."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 2.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        steps = range(1, len(self.losses[1]) + 1)
        left.plot(steps, self.losses[1], color="0.7", linewidth=4, label="1 rank")
        for size, style in zip(self.world_sizes[1:], ("-", "--", ":"), strict=False):
            left.plot(steps, self.losses[size], style, color="C0", label=f"{size} ranks")
            apart = [relative(a, b) for a, b in zip(self.losses[size], self.losses[1], strict=True)]
            # steps that agree in every digit have no place on a logarithmic axis
            right.semilogy(steps, [each or math.nan for each in apart], style, marker=".", color="C0")
        right.axhline(self.tolerance, color="0.3", linewidth=1)
        right.annotate("bound", (1, self.tolerance), xytext=(0, 3), textcoords="offset points", color="0.3")
        right.set_ylim(top=20 * self.tolerance)
        left.set(xlabel="optimizer step", ylabel="loss of the global batch", title="Loss")
        right.set(xlabel="optimizer step", ylabel="relative difference of the loss", title="Difference from 1 rank")
        for axes in (left, right):
            axes.spines[["top", "right"]].set_visible(False)
        left.legend(frameon=False)
        return figure

    def _repr_html_(self) -> str:
        from html import escape

        rows = self.table()
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        body = "".join("<tr>" + "".join(f"<td>{value:.6g}</td>" for value in row.values()) + "</tr>" for row in rows)
        return f"<p>{escape(self.verdict)}</p><table><tr>{head}</tr>{body}</table>"


def compare(
    train: Any,
    settings: Any,
    *arguments: Any,
    world_sizes: Sequence[int] = (1, 2),
    dtype: torch.dtype = torch.float32,
    check: bool = True,
) -> Equivalence:
    """Run the same training function at equal global batch on 1 and on N ranks, and hold the runs side by side.

    train: a function decorated with @distributed that takes the settings first and returns, on every rank, what
        `Trace.finish()` gives, alone or as the entry "trace" of a dict.
    settings: gpus, micro_batch and accumulation are set anew for each world size; one rank takes the whole global
        batch as a single micro-batch, so that accumulation is part of what is compared.
    dtype: of the arithmetic; the tolerance follows from it (see `tolerance`).
    check: raise NotEquivalent when the runs part without a reason; False returns the outcome only.
    """
    sizes = tuple(sorted({1, *world_sizes}))
    batch = settings.micro_batch * settings.accumulation * settings.gpus
    by_size = {size: _at(settings, size, batch) for size in sizes}  # all are checked before the first is run
    runs = {
        size: [_trace_of(value) for value in train.with_overrides(gpus=size).distributed(changed, *arguments)]
        for size, changed in by_size.items()
    }
    outcome = _judge(runs, batch, dtype)
    if check and outcome.faults:
        raise NotEquivalent(outcome.verdict)
    return outcome


def tolerance(dtype: torch.dtype, terms: int, steps: int) -> float:
    """How far equal trainings may part by rounding alone, as a relative difference.

    Re-associating a sum of n terms changes it by about u * sqrt(n), u being the unit round-off (the statistical bound
    of Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2); `terms` are those of the batch
    mean, every step adds its own, and SAFETY covers optimizers that divide by small second moments. Never above
    LOOSEST: compare in float32 where that bound is reached.
    """
    return min(LOOSEST, SAFETY * torch.finfo(dtype).eps / 2 * math.sqrt(max(1, terms) * max(1, steps)))


def _at(settings: Any, size: int, batch: int) -> Any:
    """The settings for another world size at the same global batch."""
    accumulation = 1 if size == 1 else settings.accumulation
    if batch % (size * accumulation):
        raise ValueError(
            f"world size {size}: a global batch of {batch} does not divide into {size} ranks x {accumulation} "
            "micro-batches. Choose micro_batch and accumulation so that it does."
        )
    return settings.replace(gpus=size, accumulation=accumulation, micro_batch=batch // (size * accumulation))


def _trace_of(value: Any) -> dict[str, Any]:
    trace = value.get("trace", value) if isinstance(value, dict) else value
    if not isinstance(trace, dict) or "gradient_norms" not in trace:
        raise TypeError(
            f"compare: the training function returned {type(value).__name__} without a trace: return Trace.finish(), "
            "or a dict with it under 'trace'."
        )
    if not trace["losses"]:
        raise ValueError("compare: the trace has no steps; call Trace.step(...) after each optimizer step.")
    return trace


def _judge(runs: dict[int, list[dict[str, Any]]], batch: int, dtype: torch.dtype) -> Equivalence:
    one = runs[1][0]
    bound = tolerance(dtype, batch, len(one["losses"]))
    worst = {"losses": 0.0, "gradient_norms": 0.0}
    apart = 0.0
    faults: list[str] = []
    parted: list[str] = []
    for size, by_rank in runs.items():
        if size == 1:
            faults += sample_faults(1, by_rank, one)
            continue
        many = by_rank[0]
        if len(many["losses"]) != len(one["losses"]):
            faults.append(f"{size} ranks made {len(many['losses'])} steps, one rank {len(one['losses'])}")
            continue
        for key in worst:
            worst[key] = max(worst[key], *(relative(a, b) for a, b in zip(many[key], one[key], strict=True)))
        apart = max(apart, distance(many, one))
        faults += rank_faults(by_rank) + sample_faults(size, by_rank, one)
        if not max(*worst.values(), apart) <= bound:
            parted.append(where_they_part(size, many, one, bound))
            faults += too_far(size, many, one)
    if norm(one["final"], one["initial"]) == 0:
        faults.append("training moved no weight, so there is nothing to compare")
    excuses = [] if faults else reasons(one)
    if parted and not excuses:
        faults += parted
    return Equivalence(
        world_sizes=tuple(runs),
        global_batch=batch,
        losses={size: by_rank[0]["losses"] for size, by_rank in runs.items()},
        gradient_norms={size: by_rank[0]["gradient_norms"] for size, by_rank in runs.items()},
        worst_loss=worst["losses"],
        worst_gradient_norm=worst["gradient_norms"],
        weight_distance=apart,
        tolerance=bound,
        faults=tuple(faults),
        expected=tuple(excuses) if parted else (),
    )
