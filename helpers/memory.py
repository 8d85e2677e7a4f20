"""Will it fit? Trace the peak memory of a full-size training step: no GPU, no weights, no download.

The model is built on the meta device, materialised as fake tensors (shape and dtype, no bytes) and trained
for real optimizer steps, while a ledger counts every storage that comes and goes as a caching allocator would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from helpers.ledger import CATEGORIES, SHARDABLE, Ledger

__all__ = ["CATEGORIES", "GIB", "SHARDABLE", "CannotTrace", "Peak", "trace", "trace_each"]

GIB = 2**30
LossFunction = Callable[[nn.Module, Any], torch.Tensor]
OptimizerFunction = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class CannotTrace(RuntimeError):
    """The step looks at values (not only shapes) of its tensors, which a fake tensor does not have."""


@dataclass(frozen=True)
class Peak:
    """The moment of a training step at which most bytes are alive.

    bytes: live bytes by category (the keys are CATEGORIES) at the peak of the whole step.
      weights        parameters and buffers, trained or frozen
      adapters       parameters of LoRA and the like
      gradients      what param.grad holds
      optimizer      the optimizer's state
      activations    allocated by the forward pass (or by its recomputation), and the batch
      temporary      all else that is alive just then: gradients of activations, work space of the optimizer
      communication  what FSDP2 gathers and reduces: whole weights of the block at work, whole gradients on the way
    phase: "forward", "backward" or "step", in which that moment lies.
    moments: "phase/section/kind" -> bytes by category, for the peak of that phase in that section of the model (kind
      "peak") and for the peak of what no strategy shards (kind "unsharded"). Sharding formulas start from these.
    micro_batch: samples per forward pass in this trace.
    parameters, trainable: number of elements of the whole model, each tied weight once.
    """

    moments: Mapping[str, Mapping[str, int]] = field(repr=False)
    micro_batch: int
    parameters: int
    trainable: int

    @property
    def bytes(self) -> Mapping[str, int]:
        return self.moments[self._highest]

    @property
    def phase(self) -> str:
        return self._highest.split("/")[0]

    @property
    def _highest(self) -> str:
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in self.bytes.items() if size)
        return f"peak {self.total / GIB:.2f} GiB in {self.phase}: {parts}"


def trace(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss_fn: LossFunction,
    micro_batch: int,
    **options: Any,
) -> Peak:
    """The memory peak of one rank's training step: trace_each for one micro-batch size, same options and errors."""
    return trace_each(build_model, make_batch, loss_fn, [micro_batch], **options)[0]


def trace_each(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss_fn: LossFunction,
    micro_batches: Sequence[int],
    *,
    optimizer: OptimizerFunction,
    autocast: torch.dtype | None = None,
    accumulation: int = 1,
    keep_gradients: bool = False,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
    fake: bool = True,
) -> list[Peak]:
    """Train one rank for one optimizer step at each micro-batch size, state already there; a Peak for each size.

    build_model: makes the model; called under torch.device("meta"), so it may be of any size.
    make_batch: make_batch(micro_batch) gives one micro-batch of real tensors, in any nesting.
    loss_fn: loss_fn(model, batch) gives the scalar loss.
    optimizer: optimizer(trainable_parameters) gives a torch optimizer. One that leaves `foreach` open gets
      foreach=True, which is what torch picks on a GPU and what needs memory for it.
    autocast: run forward and loss under autocast to this dtype (weights stay as build_model made them).
    accumulation: micro-batches per step; beyond two the peak no longer changes, so at most two are run.
    keep_gradients: gradients are zeroed in place, not freed (as DDP's gradient_as_bucket_view does).
    wrap: wrap(model) after materialisation, e.g. with fully_shard.
    blocks: blocks(model) gives the submodules that run one after the other; the first and the last get sections of
      their own in Peak.moments (see helpers.fit.depth).
    fake: False runs the same accounting on real CPU tensors (to check it, on small models).
    Raises CannotTrace naming the operator that needs values; ValueError for a micro-batch below 1 or a model
    without a trainable parameter.
    """
    if min(micro_batches) < 1 or accumulation < 1:
        raise ValueError(f"micro_batch={min(micro_batches)}, accumulation={accumulation}: both must be 1 or more.")
    with contextlib.ExitStack() as stack:
        mode = stack.enter_context(fake_tensor.FakeTensorMode()) if fake else None
        model = _materialise(build_model, mode)
        model = wrap(model) if wrap else model
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError("No parameter of the model requires gradients: there is nothing to train.")
        stepped = _as_on_gpu(optimizer(trained))
        ledger = stack.enter_context(Ledger(model))
        for place, block in _placed(blocks(model) if blocks else ()):
            _announce(block, place, ledger)
        for parameter in trained:  # a step on empty gradients makes the optimizer's state, as any first step does
            parameter.grad = torch.zeros_like(parameter)
        _optimizer_step(ledger, stepped, keep_gradients)
        peaks = []
        for size in micro_batches:
            ledger.enter("setup")
            ledger.records.clear()
            batch = _batch_for(make_batch, size, mode)
            ledger.claim(tree_leaves(batch), "activations")
            for _ in range(min(accumulation, 2)):
                _forward_backward(ledger, model, batch, loss_fn, autocast)
            ledger.enter("step")
            _optimizer_step(ledger, stepped, keep_gradients)
            peaks.append(_peak(ledger, model, size))
        return peaks


def _optimizer_step(ledger: Ledger, optimizer: torch.optim.Optimizer, keep_gradients: bool) -> None:
    optimizer.step()
    ledger.claim(tree_leaves([dict(state) for state in optimizer.state.values()]), "optimizer")
    optimizer.zero_grad(set_to_none=not keep_gradients)


def _forward_backward(
    ledger: Ledger, model: nn.Module, batch: Any, loss_fn: LossFunction, autocast: torch.dtype | None
) -> None:
    ledger.enter("forward")
    try:
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = loss_fn(model, batch)
        ledger.enter("backward")
        loss.backward()
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
        raise CannotTrace(
            f"The {ledger.phase} pass needs the values of a tensor at {error.func}, and a fake tensor has only "
            "a shape. Avoid branches on tensor values, boolean indexing and nonzero() in the model and the loss."
        ) from error


def _placed(blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    places = ["first", *["middle"] * (len(blocks) - 2), "last"] if len(blocks) > 1 else ["first"] * len(blocks)
    return list(zip(places, blocks, strict=True))


def _announce(block: nn.Module, place: str, ledger: Ledger) -> None:
    """Tell the ledger when this block runs forward, when its recomputation does and when its backward pass does."""

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if ledger.phase == "forward" and place == "last":
            ledger.enter("forward", "head")
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda grad: ledger.enter("backward", place))

    block.register_forward_pre_hook(lambda module, args: ledger.enter(ledger.phase, place))
    block.register_forward_hook(leave)


def _peak(ledger: Ledger, model: nn.Module, micro_batch: int) -> Peak:
    parameters = list(model.parameters())
    return Peak(
        moments={moment: snapshot for moment, (_, _, snapshot) in ledger.records.items()},
        micro_batch=micro_batch,
        parameters=sum(p.numel() for p in parameters),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def _materialise(build_model: Callable[[], nn.Module], mode: fake_tensor.FakeTensorMode | None) -> nn.Module:
    """The model with fake tensors in place of meta tensors, tied weights still tied; real when mode is None."""
    if mode is None:
        return build_model()
    with fake_tensor.unset_fake_temporarily(), torch.device("meta"):
        model = build_model()
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        stores: tuple[Any, ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                    made[id(tensor)].__dict__.update(tensor.__dict__)  # marks that an optimizer looks for
                store[name] = made[id(tensor)]
    return model


def _batch_for(make_batch: Callable[[int], Any], size: int, mode: fake_tensor.FakeTensorMode | None) -> Any:
    if mode is None:
        return make_batch(size)
    try:
        batch = make_batch(size)  # fake from the start, so that a large batch costs nothing
    except Exception:  # one that reads real data cannot be made of fake tensors
        with fake_tensor.unset_fake_temporarily():
            batch = make_batch(size)
    return tree_map_only(torch.Tensor, lambda t: t if mode.is_our_fake(t) else mode.from_tensor(t), batch)


def _as_on_gpu(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    # torch picks foreach on GPUs and a loop on CPUs; Adafactor alone keeps the loop everywhere, to save memory.
    if not isinstance(optimizer, torch.optim.Adafactor):
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
    return optimizer
