"""Full precision, the base class of the others."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from accel.enums import FP8BackendType
from accel.kwargs import KwargsHandler
from accel.plugins import AutocastKwargs


class Precision:
    """Computation in the types of the model, with scaled losses if there is a ``scaler``, which a script may replace.

    Subclasses wrap forwards and run autocast. ``fp8_backend`` computes in 8 bits, by ``recipe``.
    """

    fp8_backend: ClassVar[FP8BackendType] = FP8BackendType.NO
    recipe: KwargsHandler | None = None

    def __init__(self, device: torch.device, scaler: torch.amp.GradScaler | None = None) -> None:
        self.device = device
        self.scaler = scaler
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def convert(self, model: torch.nn.Module, compiled: bool = False) -> None:
        """Replace layers of ``model``, which is to be trained, before it is distributed.

        ``compiled``: the model is compiled, or will be.
        """

    def wrap_forward(self, model: torch.nn.Module, autocast: bool = True) -> None:
        """Make ``model`` compute in this precision wherever it is called; without ``autocast`` it does already."""

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that runs operations in this precision."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``, or of the scaled loss."""
        if self.scaler is not None:
            self.finish_pending()
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, once between two steps."""
        if self.scaler is not None and self.scaler.is_enabled() and id(optimizer) not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool | list[torch.Tensor]:
        """Step ``optimizer``; return True if that was skipped because scaled gradients were not finite.

        If only the device knows, as with a fused optimizer, return tensors; a nonzero one means skipped.
        """
        if id(optimizer) in self._stepped:
            self.finish_pending()
        arguments = [] if closure is None else [closure]
        if self.scaler is None or not self.scaler.is_enabled():
            optimizer.step(*arguments)
            return False
        self.scaler.step(optimizer, *arguments)
        self._stepped.add(id(optimizer))
        state: dict[str, Any] = self.scaler._per_optimizer_states[id(optimizer)]
        if "skipped" in state:
            return bool(state["skipped"])
        # Copies: `update` adds the numbers of all optimizers to those of the first.
        return [found_inf.clone() for found_inf in state["found_inf_per_device"].values()]

    def finish_pending(self) -> None:
        """Update the scale after all optimizers have stepped, as each was unscaled by the old one.

        Called before the next loss and before the state is saved.
        """
        if self._stepped and self.scaler is not None:
            self.scaler.update()
            self._unscaled.clear()
            self._stepped.clear()
