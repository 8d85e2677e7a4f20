"""What one rank notes while it trains, so that helpers.equivalence can hold two runs side by side."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from helpers import ranks


@dataclass
class Trace:
    """What one rank notes while it trains, so that two runs can be compared. Create it before the first step.

    model: the model, wrapped or not; its initial weights, BatchNorm layers and dropout layers are noted.
    """

    model: torch.nn.Module = field(repr=False)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    evaluated: int | None = None

    def __post_init__(self) -> None:
        modules = {name.removeprefix("module."): module for name, module in self.model.named_modules()}
        batch_norm = torch.nn.modules.batchnorm._BatchNorm
        self.batch_norms = [
            name
            for name, module in modules.items()
            if isinstance(module, batch_norm) and not isinstance(module, torch.nn.SyncBatchNorm)
        ]
        dropout = torch.nn.modules.dropout._DropoutNd
        self.dropouts = [name for name, module in modules.items() if isinstance(module, dropout) and module.p > 0]
        self.initial = self._weights()

    def step(self, loss: float, gradient_norm: float, samples: Iterable[int] = (), epoch: int = 0) -> None:
        """Note one optimizer step.

        loss: the mean over the global batch, so the same on every rank; gradient_norm: of the whole model, before
        clipping; samples: the identities of this rank's samples in this step, over all its micro-batches.
        """
        self.losses.append(float(loss))
        self.gradient_norms.append(float(gradient_norm))
        self.samples.append([int(each) for each in samples])
        self.epochs.append(epoch)

    def finish(self, evaluated: int | None = None) -> dict[str, Any]:
        """Plain data for the rank function to return. evaluated: samples that this rank counted in its metric."""
        with torch.random.fork_rng(devices=[]):
            draw = torch.rand(4).tolist()  # ranks that would draw the same dropout masks draw the same numbers
        return {
            "losses": self.losses,
            "gradient_norms": self.gradient_norms,
            "samples": self.samples,
            "epochs": self.epochs,
            "evaluated": evaluated,
            "initial": self.initial,
            "final": self._weights(),
            "draw": draw,
            "batch_norms": self.batch_norms,
            "dropouts": self.dropouts,
            "rank": ranks.rank(),
        }

    def _weights(self) -> dict[str, torch.Tensor]:
        return {
            name.removeprefix("module."): parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self.model.named_parameters()
        }
