"""Moving batches to a device, with little overhead over torch's own call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accel.pytree import send_to_device
from accel.state import PartialState
from accel.world import xla


def mover(device: torch.device, non_blocking: bool) -> Callable[[Any], Any]:
    """Return `send_to_device` for one device, with a fast path for tensors and for dicts and lists of them."""

    def move(batch: Any) -> Any:
        kind = type(batch)
        if kind is Tensor:
            return batch.to(device)
        if kind is dict:
            return {key: item.to(device) if type(item) is Tensor else move(item) for key, item in batch.items()}
        if kind is list:
            return [item.to(device) if type(item) is Tensor else move(item) for item in batch]
        return send_to_device(batch, device)

    if PartialState._shared_state.get("backend") == xla.BACKEND:
        return _Recording(move)
    return partial(send_to_device, device=device, non_blocking=True) if non_blocking else move


class _Recording:
    """A move that ends torch_xla's recording of the previous batch: one graph per step, not one per epoch."""

    def __init__(self, move: Callable[[Any], Any]) -> None:
        self._move = move

    def __call__(self, batch: Any) -> Any:
        xla.sync()
        return self._move(batch)
