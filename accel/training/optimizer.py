"""The optimizer and the learning rate scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel.parallel.base import Strategy
from accel.precision.base import Precision
from accel.pytree import send_to_device
from accel.state import GradientState, PartialState


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps, and clears gradients, only on the batch that ends an accumulation window.

    It has the state, groups and defaults of ``optimizer``, which does the work: in the given ``precision`` or,
    with a ``scaler``, skipping steps whose gradients overflowed. ``strategy``: that of an `Accelerator`.
    """

    _strategy: Strategy | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: torch.amp.GradScaler | None = None,
        *,
        precision: Precision | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.gradient_state = GradientState()
        self.precision = precision or Precision(torch.device("cpu" if scaler is None else scaler._device), scaler)
        self.device_placement = device_placement
        self._strategy = strategy
        self._skipped: bool | list[torch.Tensor] = False
        if device_placement:
            _place_state(optimizer)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; ``None`` without fp16."""
        return self.precision.scaler

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer; its tensors go where the parameters are."""
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients, unless a window is being accumulated."""
        if self.gradient_state.sync_gradients:
            kwargs = {} if set_to_none is None else {"set_to_none": set_to_none}
            if self._strategy is None:
                self.optimizer.zero_grad(**kwargs)
            else:
                self._strategy.zero_grad(self.optimizer, **kwargs)

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
        if not self.gradient_state.sync_gradients:
            return
        if self._strategy is None:
            self._skipped = self.precision.step(self.optimizer, closure)
        else:
            self._skipped = self._strategy.step(self.optimizer, self.precision, closure)

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was skipped because gradients were not finite."""
        if not isinstance(self._skipped, bool):  # waits for the device
            self._skipped = any(map(bool, self._skipped))
        return self._skipped

    def __getstate__(self) -> dict[str, Any]:
        # A scheduler sets a counting `step` on the instance, which cannot be pickled; nor can a strategy.
        return {name: value for name, value in self.__dict__.items() if name not in ("step", "_strategy")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


def _place_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state to its parameters' devices, except step counts, which stay where the optimizer put them."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.device != parameter.device:
                state[name] = send_to_device(value, parameter.device)


# The learning rate scheduler.


class AcceleratedScheduler:
    """A scheduler that steps after its optimizers have stepped, once per process.

    A schedule is written for one process. With P processes that see different data (``shares``, by default all of
    the world) each optimizer step uses P batches, so the schedule advances by P; with ``split_batches`` (the
    batch size is the total of all processes), and for `ReduceLROnPlateau`, it advances by one. It does not advance
    when a step was skipped (fp16 overflow) or while gradients are accumulated. With ``step_with_optimizer=False``
    every ``step()`` is one step.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
        *,
        shares: int | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[Any] = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._shares = shares
        self.gradient_state = GradientState()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers have stepped."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                self.scheduler._step_count += 1
        elif not any(getattr(optimizer, "step_was_skipped", False) for optimizer in self.optimizers):
            self._step(*args, **kwargs)

    def _step(self, *args: Any, **kwargs: Any) -> None:
        total = getattr(self.scheduler, "total_steps", None)
        # ReduceLROnPlateau counts measurements, not batches.
        once = self.split_batches or isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        for _ in range(1 if once else self._shares or PartialState().num_processes):
            # Several steps at once may overshoot a schedule of fixed length, which would then fail or rise again.
            if total is None or self.scheduler.last_epoch + 1 < total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Return the current learning rates, by parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """Call the wrapped scheduler's method."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped scheduler's method."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped scheduler."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped scheduler."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A scheduler that an engine advances in its own step, so that ``step()`` does nothing."""

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self) -> None:
        """Do nothing: the engine has advanced the schedule."""
