"""Full precision, the base class of the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel.plugins import AutocastKwargs


class Precision:
    """Computation in the types of the model. Subclasses wrap forwards, run autocast and scale fp16 gradients."""

    scaler: torch.amp.GradScaler | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wrap_forward(self, model: torch.nn.Module, autocast: bool = True) -> None:
        """Make ``model`` compute in this precision wherever it is called; without ``autocast`` it does already."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that runs operations in this precision."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the loss scale, once per step."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool | list[torch.Tensor]:
        """Step ``optimizer``; return True if that was skipped because gradients were not finite.

        If only the device knows, return tensors of which one is not zero if so.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return False

    def finish_pending(self) -> None:
        """Finish pending steps; called before the next loss and before the state is saved."""
