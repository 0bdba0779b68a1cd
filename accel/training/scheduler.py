"""The learning rate scheduler that `Accelerator.prepare` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accel.state import GradientState, PartialState


class AcceleratedScheduler:
    """A scheduler that steps when its optimizers did, and as often as there are processes.

    A schedule is written for one process. With P processes that see different data (``shares``, by default all of
    the world) each optimizer step uses P batches, so the schedule advances by P; with ``split_batches`` (the
    batch size is the total of all processes) it advances by one. It does not advance when a step was skipped
    (fp16 overflow) or while gradients are accumulated. With ``step_with_optimizer=False`` every ``step()`` is one
    step.
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
        for _ in range(1 if self.split_batches else self._shares or PartialState().num_processes):
            # Several steps at once may overshoot a schedule of fixed length, which would fail or rise again there.
            if total is None or self.scheduler.last_epoch + 1 < total:
                self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> Any:
        """Return the current learning rates, by parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> Any:
        """See the scheduler inside."""
        return self.scheduler.get_lr()

    def print_lr(self, *args: Any, **kwargs: Any) -> Any:
        """See the scheduler inside."""
        return self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the scheduler inside."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the scheduler inside."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)
