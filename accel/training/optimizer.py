"""The optimizer that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.precision.amp import HalfPrecision
from accel.precision.base import Precision
from accel.pytree import send_to_device
from accel.state import GradientState


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps, and clears gradients, only on the batch that ends an accumulation window.

    It has the state, groups and defaults of ``optimizer``, which does the work: in the given ``precision`` or,
    with a ``scaler``, skipping steps whose gradients overflowed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        precision: Precision | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.gradient_state = GradientState()
        if precision is None:
            precision = Precision(torch.device("cpu")) if scaler is None else HalfPrecision.scaled_by(scaler)
        self.precision = precision
        self.device_placement = device_placement
        self._skipped = False
        if device_placement:
            _place_state(optimizer)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; ``None`` without fp16."""
        return self.precision.scaler

    @property
    def state(self) -> Any:
        """The state of the optimizer inside."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """The parameter groups of the optimizer inside."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        """The defaults of the optimizer inside."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the optimizer inside; its tensors go where the parameters are."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless a window is being accumulated."""
        if self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    def train(self) -> None:
        """Switch an optimizer that has modes (schedule-free ones) to training."""
        self._mode("train")

    def eval(self) -> None:
        """Switch an optimizer that has modes (schedule-free ones) to evaluation."""
        self._mode("eval")

    def _mode(self, name: str) -> None:
        switch = getattr(self.optimizer, name, None)
        if callable(switch):
            switch()

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step, unless in the middle of a window; `step_was_skipped` is true if fp16 gradients overflowed."""
        if self.gradient_state.sync_gradients:
            self._skipped = self.precision.step(self.optimizer, closure)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients were not finite."""
        return self._skipped

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler replaces `step` on the instance by a function that counts, which cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _place_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state created before its parameters were moved (step counts stay where the optimizer wants them)."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                state[name] = send_to_device(value, parameter.device)
