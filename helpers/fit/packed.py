"""What bitsandbytes keeps in memory, byte for byte, without its arithmetic: 4-bit weights and 8-bit AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

_WEIGHT_BLOCK, _SCALE_BLOCK = 64, 256  # NF4: weights per absmax; absmax values per second absmax
_STATE_BLOCK, _SMALL = 256, 4096  # 8-bit optimizers: elements per absmax; smaller tensors keep 32-bit state


class Linear4bit(nn.Linear):
    """A frozen linear layer in bitsandbytes' NF4 layout with double quantisation.

    Two weights to a byte, held in the compute dtype so that FSDP can shard it (`bnb_4bit_quant_storage`); one byte of
    absmax per 64 weights; an fp32 absmax per 256 of those; an fp32 offset and the two code books. Forward and backward
    each unpack the whole weight for the time of one matrix product.
    """

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = like.in_features, like.out_features, like.bias
        self.compute = like.weight.dtype
        count, device = like.weight.numel(), like.weight.device
        stored = -(-count // 2 // self.compute.itemsize)
        self.weight = nn.Parameter(torch.empty(stored, 1, dtype=self.compute, device=device), requires_grad=False)
        blocks = -(-count // _WEIGHT_BLOCK)
        self.register_buffer("absmax", torch.empty(blocks, dtype=torch.uint8, device=device))
        self.register_buffer("absmax2", torch.empty(-(-blocks // _SCALE_BLOCK), device=device))
        self.register_buffer("offset", torch.empty((), device=device))
        self.register_buffer("code", torch.empty(16, device=device))
        self.register_buffer("code2", torch.empty(256, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (self.out_features, self.in_features)
        x = x.to(self.compute)
        return _Unpacked.apply(x, self.weight, self.absmax, self.bias, shape, self.compute)


class _Unpacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        packed: torch.Tensor,
        absmax: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(packed, absmax)
        ctx.unpacked = shape, dtype
        return functional.linear(x, _unpack(absmax, shape, dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _, absmax = ctx.saved_tensors
        return grads[0] @ _unpack(absmax, *ctx.unpacked), None, None, None, None, None


def _unpack(absmax: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    scales = absmax.float()  # the second quantisation is undone first, into fp32
    weight = torch.zeros(shape, dtype=dtype, device=absmax.device)
    del scales
    return weight


def pack(model: nn.Module, keep: nn.Module | None) -> None:
    """Replace every nn.Linear by its 4-bit twin, except `keep` (bitsandbytes leaves the output head as it is)."""
    for name, part in list(model.named_modules()):
        if type(part) is nn.Linear and part is not keep:
            model.set_submodule(name, Linear4bit(part))


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with bitsandbytes' block-wise 8-bit state: two bytes an element and two fp32 absmax per 256 elements.

    Tensors below 4096 elements, and embeddings (as the Hugging Face Trainer asks for), keep two fp32 states. The step
    runs in one fused kernel per tensor, so it needs no work space; its values are not computed here.
    """

    def __init__(self, params: Any, lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self.state[parameter].update(self._state_for(parameter))

    @staticmethod
    def _state_for(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.numel() < _SMALL or getattr(parameter, "keeps_32_bit_state", False):
            return {name: torch.zeros_like(local, dtype=torch.float32) for name in ("state1", "state2")}
        blocks = -(-local.numel() // _STATE_BLOCK)
        state = {name: torch.zeros_like(local, dtype=torch.uint8) for name in ("state1", "state2")}
        state |= {name: torch.zeros(blocks, device=local.device) for name in ("absmax1", "absmax2")}
        return state
