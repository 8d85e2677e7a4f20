"""A ledger of live bytes: follows every storage that torch operators allocate and free, by what it is for."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

SHARDABLE = ("weights", "adapters", "gradients", "optimizer")  # what a strategy can divide among ranks
CATEGORIES = (*SHARDABLE, "activations", "temporary", "communication")
BLOCK = 512  # bytes: CUDA's caching allocator hands out multiples of this


class Ledger(TorchDispatchMode):
    """Counts, while entered, the bytes of every live storage by category, and keeps the highest sums of each phase.

    phase: "forward", "backward" or "step" (or "setup", which is counted but sets no record); see `enter`.
    section: the part of the model at work, "" unless someone sets it.
    live: bytes alive now, by category.
    records: moment -> (height, time, bytes by category). A moment is phase/section/"peak" (most bytes in all) or
      phase/section/"unsharded" (most bytes outside SHARDABLE).
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.phase, self.section = "setup", ""
        self.live = dict.fromkeys(CATEGORIES, 0)
        self.records: dict[str, tuple[int, int, dict[str, int]]] = {}
        self._time = 0
        self._entries: dict[int, list[Any]] = {}  # id(storage) -> [category, bytes, time of birth, weak reference]
        named = list(model.named_parameters())
        self.claim([p for name, p in named if "lora_" in name], "adapters")
        self.claim([p for name, p in named if "lora_" not in name], "weights")
        self.claim(model.buffers(), "weights")
        for _, parameter in named:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.claim([p.grad], "gradients"))

    def enter(self, phase: str, section: str = "") -> None:
        """From now on allocations belong to this phase and section; what is alive already is its first height."""
        self.phase, self.section = phase, section
        self._note_if_highest()

    def claim(self, tensors: Iterable[Any], category: str) -> None:
        """Move the storages of these tensors into the category (counting them if they are not known yet)."""
        for storage in _storages_in(list(tensors)):
            self._count(storage, category, move=True)

    def __enter__(self) -> Ledger:
        self._resize = torch.UntypedStorage.resize_  # FSDP2 frees gathered weights so, past the dispatcher

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            self._count(storage, None)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            return 1.0  # .item() of a loss for a log, or of an optimizer's step count: any number will do
        result = func(*args, **(kwargs or {}))
        for storage in _storages_in(result):
            self._count(storage, self._category_of_new())
        if func.namespace in ("fsdp", "c10d", "_c10d_functional"):
            for storage in _storages_in((args, kwargs, result)):
                entry = self._entries.get(id(storage))
                if entry and entry[0] not in SHARDABLE:
                    self._move(entry, "communication")
        return result

    def _category_of_new(self) -> str:
        # Autograd switches gradients off in backward; they are on there only while a checkpoint is recomputed.
        forward = self.phase == "forward" or (self.phase == "backward" and torch.is_grad_enabled())
        return "activations" if forward else "temporary"

    def _count(self, storage: torch.UntypedStorage, category: str | None, move: bool = False) -> None:
        key = id(storage)
        entry = self._entries.get(key)
        if entry is None:
            if category is None:
                return
            self._time += 1
            entry = [category, 0, self._time, weakref.ref(storage, lambda _: self._forget(key))]
            self._entries[key] = entry
        elif move and category != entry[0]:
            self._move(entry, str(category))
        size = math.ceil(storage.nbytes() / BLOCK) * BLOCK
        if size != entry[1]:
            self.live[entry[0]] += size - entry[1]
            entry[1] = size
            self._note_if_highest()

    def _move(self, entry: list[Any], category: str) -> None:
        # What turns out to be a gradient or optimizer state was already that at a record it was alive at.
        was, size, birth, _ = entry
        records = [snapshot for _, time, snapshot in self.records.values() if time >= birth]
        for account in (self.live, *records):
            account[was] -= size
            account[category] += size
        entry[0] = category

    def _forget(self, key: int) -> None:
        category, size, _, _ = self._entries.pop(key)
        self.live[category] -= size

    def _note_if_highest(self) -> None:
        if self.phase == "setup":
            return
        total = sum(self.live.values())
        unsharded = total - sum(self.live[category] for category in SHARDABLE)
        for kind, height in (("peak", total), ("unsharded", unsharded)):
            moment = f"{self.phase}/{self.section}/{kind}"
            if height > self.records.get(moment, (-1,))[0]:
                self.records[moment] = height, self._time, dict(self.live)


def _storages_in(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            yield from _storages(leaf)


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    if is_traceable_wrapper_subclass(tensor):  # DTensor: the local shard is what this rank holds
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):
                yield from _storages(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
