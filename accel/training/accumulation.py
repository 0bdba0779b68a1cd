"""Gradient accumulation: the end of each window, and the weight of its batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from accel.parallel.base import Strategy
from accel.state import GradientState


class Window:
    """A counter of batches in windows of ``num_steps``; a loader's end may shorten the last window."""

    def __init__(self, state: GradientState) -> None:
        self.state = state
        self.step = 0
        self.in_batch = False
        self._length: int | None = None  # of the current window; None: not known yet

    @property
    def length(self) -> int:
        """The number of batches in the current window, within `Accumulation`; otherwise ``num_steps``."""
        return self._length if self.in_batch and self._length is not None else self.state.num_steps

    def begin_batch(self) -> None:
        """Count one batch and decide whether it ends its window."""
        state = self.state
        plugin = state.plugin
        position = self.step % plugin.num_steps
        if position == 0 or self._length is None:
            self._length = self._length_from(position)
        self.in_batch = True
        if plugin.sync_with_dataloader and state.end_of_dataloader:
            self.step = 0
            state.sync_gradients = True
        else:
            self.step += 1
            state.sync_gradients = position + 1 == plugin.num_steps

    def _length_from(self, position: int) -> int:
        plugin = self.state.plugin
        active = self.state.active_dataloader
        if plugin.sync_with_dataloader and plugin.num_steps > 1 and active is not None:
            remaining = active.batches_left
            if remaining is not None:
                return min(plugin.num_steps, position + remaining)
        return plugin.num_steps

    @property
    def is_open(self) -> bool:
        """True if batches have been counted since the last optimizer step."""
        return self.step % self.state.num_steps != 0

    def resume(self, step: int) -> None:
        """Continue after ``step`` batches of a window."""
        self.step = step
        self._length = None


class Accumulation:
    """A context manager for one batch: gradients are not synchronized unless it ends the window."""

    def __init__(self, window: Window, strategy: Strategy, models: Sequence[Any]) -> None:
        self._window = window
        self._strategy = strategy
        self._models = models
        self._no_sync: ExitStack | None = None

    def __enter__(self) -> None:
        self._window.begin_batch()
        state = self._window.state
        if state.sync_gradients or state.plugin.sync_each_batch:
            return
        self._no_sync = ExitStack()
        for model in self._models:
            self._no_sync.enter_context(self._strategy.no_sync(model))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window.in_batch = False
        if self._no_sync is not None:
            no_sync, self._no_sync = self._no_sync, None
            no_sync.__exit__(kind, error, trace)
