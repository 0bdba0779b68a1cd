"""Local SGD: processes train on their own and average their weights every few steps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from accel.collectives import reduce
from accel.errors import ArgumentError

if TYPE_CHECKING:
    from accel.accelerator import Accelerator

# Bytes averaged at once, so that the weights are not held twice.
_PIECE = 64 << 20


class LocalSGD:
    """A context manager that keeps gradients of ``model`` on their process and averages weights at intervals.

    Weights are averaged at every ``local_sgd_steps``-th call of `step`, which follows the optimizer's, and at the
    end of the block, unless an error ends it. A world of one and ``enabled=False`` do nothing. Optimizer states
    are not averaged. Every process must take equally many steps. Raises `ArgumentError` for fewer than one step
    and for sharded models and engines.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if local_sgd_steps < 1:
            raise ArgumentError(f"LocalSGD(local_sgd_steps={local_sgd_steps}): it must be 1 or more")
        if enabled and accelerator.strategy.shards_models:
            raise ArgumentError("LocalSGD needs a complete model on each process: it does not support sharded models")
        if enabled and accelerator.strategy.is_engine:
            raise ArgumentError("LocalSGD averages weights between steps: it supports no engine, such as DeepSpeed's")
        if enabled and accelerator.strategy.copies > 1:
            raise ArgumentError(
                "LocalSGD needs a complete sequence on each process: it does not support cp_size and sp_size"
            )
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.enabled = enabled and accelerator.use_distributed
        self.num_steps = 0
        self._no_sync: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._no_sync = self.accelerator.no_sync(self.model)
            self._no_sync.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._no_sync is None:
            return
        no_sync, self._no_sync = self._no_sync, None
        no_sync.__exit__(kind, error, trace)
        # After an error this process does not know whether the others come here.
        if error is None:
            self._average()

    def step(self) -> None:
        """Count an optimizer step, and average the weights when due."""
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        piece: list[torch.Tensor] = []
        size = 0
        for parameter in self.model.parameters():
            piece.append(parameter.data)
            size += parameter.numel() * parameter.element_size()
            if size >= _PIECE:
                _average_in_place(piece)
                piece, size = [], 0
        _average_in_place(piece)


def _average_in_place(weights: list[torch.Tensor]) -> None:
    if weights:
        torch._foreach_copy_(weights, reduce(weights, "mean"))
