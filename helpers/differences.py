"""What differs between two traced runs, and what usually causes it: the diagnosis behind helpers.equivalence."""

import math
from typing import Any

import torch

COARSE = 1.5  # with a reason to differ, how many times as far the weights may still have moved


def rank_faults(by_rank: list[dict[str, Any]]) -> list[str]:
    """What must agree, and what must not, between the ranks of one run."""
    found = []
    first = by_rank[0]
    for key, told in (
        ("initial", "start from different weights (a seed by rank, and no broadcast)"),
        ("final", "end with different weights (a parameter outside DistributedDataParallel)"),
    ):
        for name, tensor in first[key].items():
            if any(not torch.equal(tensor, other[key][name]) for other in by_rank[1:]):
                found.append(f"ranks {told}; the first that differs is {name!r}")
                break
    if any(other["losses"] != first["losses"] for other in by_rank[1:]):
        found.append("ranks report different losses (each its own batch's; reduce the loss over all ranks)")
    if first["dropouts"] and all(other["draw"] == first["draw"] for other in by_rank[1:]):
        found.append(f"all ranks draw the same dropout masks in {first['dropouts'][0]!r} (one seed for every rank)")
    return found


def sample_faults(size: int, by_rank: list[dict[str, Any]], one: dict[str, Any]) -> list[str]:
    """Whether the same samples were seen in the same steps, in a new order each epoch, and counted once."""
    found = []
    steps = [{sample for trace in by_rank for sample in trace["samples"][step]} for step in range(len(one["samples"]))]
    for step, seen in enumerate(steps):
        # a padded tail repeats samples that one rank has no need of
        if size > 1 and seen != set(one["samples"][step]):
            found.append(f"step {step + 1} on {size} ranks holds other samples than on one rank")
            break
    epochs: dict[int, list[int]] = {}
    for trace_step, epoch in zip(by_rank[0]["samples"], by_rank[0]["epochs"], strict=True):
        epochs.setdefault(epoch, []).extend(trace_step)
    orders = list(epochs.values())
    if len(orders) > 1 and any(orders) and all(order == orders[0] for order in orders):
        found.append(f"every epoch has the same order on {size} rank(s) (set_epoch is not called, or shuffle is off)")
    counts = [trace["evaluated"] for trace in by_rank]
    if size > 1 and one["evaluated"] is not None and None not in counts and sum(counts) != one["evaluated"]:
        found.append(
            f"{size} ranks count {sum(counts)} evaluation samples and one rank {one['evaluated']} (padding is counted)"
        )
    return found


def too_far(size: int, many: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """Differences that BatchNorm and dropout do not explain."""
    if not (one["batch_norms"] or one["dropouts"]):
        return []  # told by `_where_they_part`, with its likeliest cause
    numbers = [*many["losses"], *many["gradient_norms"], movement(many), movement(one)]
    if not all(map(math.isfinite, numbers)):
        return [f"{size} ranks: a loss, a gradient norm or a weight is not finite"]
    moved = movement(many) / movement(one)
    if not 1 / COARSE < moved < COARSE:
        return [f"{size} ranks: weights moved {moved:.3g} times as far, more than BatchNorm or dropout explain"]
    return []


def where_they_part(size: int, many: dict[str, Any], one: dict[str, Any], bound: float) -> str:
    """The first quantity that differs tells what kind of fault it is."""
    loss = relative(many["losses"][0], one["losses"][0])
    gradient = relative(many["gradient_norms"][0], one["gradient_norms"][0])
    if loss > bound:
        return (
            f"{size} ranks: the first loss differs by {loss:.1e} (bound {bound:.1e}): other samples, other initial "
            "weights, or a mean of means where micro-batches are uneven"
        )
    if gradient > bound:
        ratio = many["gradient_norms"][0] / one["gradient_norms"][0]
        return (
            f"{size} ranks: the first loss agrees and the first gradient norm is {ratio:.3g} times that of one rank: "
            "the loss is normalised differently (per micro-batch or per rank, not over the global batch)"
        )
    moved = movement(many) / movement(one)
    return (
        f"{size} ranks: the first step agrees and later ones part (weights moved {moved:.3g} times as far): the "
        "learning rate, the schedule or the optimizer differs with the world size"
    )


def reasons(one: dict[str, Any]) -> list[str]:
    found = []
    if one["batch_norms"]:
        found.append(
            f"BatchNorm {one['batch_norms'][0]!r} takes its statistics from each rank's own micro-batch "
            "(torch.nn.SyncBatchNorm.convert_sync_batchnorm makes them global)"
        )
    if one["dropouts"]:
        found.append(f"dropout {one['dropouts'][0]!r} draws other masks on other ranks (compare with dropout 0)")
    return found


def relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf


def movement(trace: dict[str, Any]) -> float:
    return max(1e-12, norm(trace["final"], trace["initial"]))


def distance(many: dict[str, Any], one: dict[str, Any]) -> float:
    apart = norm(many["final"], one["final"]) / movement(one)
    return apart if math.isfinite(apart) else math.inf


def norm(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    squared = sum((a[name].double() - b[name].double()).square().sum().item() for name in b)
    return math.sqrt(squared) if math.isfinite(squared) else math.inf
