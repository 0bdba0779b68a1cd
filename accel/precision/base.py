"""Full precision: every hook does nothing, or the plain thing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel.plugins import AutocastKwargs


class Precision:
    """Computes in the types the model has.

    A precision wraps the forward of models, opens autocast regions, and stands between loss and gradients and between
    gradients and optimizer, where fp16 must scale.
    """

    scaler: torch.amp.GradScaler | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap_forward(self, model: torch.nn.Module) -> None:
        """Make ``model`` compute in this precision wherever it is called."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A region in which operations run in this precision."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the gradients of ``optimizer`` those of the loss itself, once a step."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        """Take an optimizer step; returns whether it was left out because gradients were not finite."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return False

    def settle(self) -> None:
        """Finish what steps have left open; called before the next loss and before the state is saved."""
