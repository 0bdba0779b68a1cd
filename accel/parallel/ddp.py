"""Data parallel: every process has the full model, and gradients are averaged as they become ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accel.parallel.base import Strategy
from accel.parallel.unwrap import data_parallel
from accel.plugins import DistributedDataParallelKwargs
from accel.state import PartialState
from accel.world.process_group import hold_open


class DataParallel(Strategy):
    """torch's DistributedDataParallel, with the script's ``DistributedDataParallelKwargs``."""

    joins = True

    def __init__(self, state: PartialState, kwargs: DistributedDataParallelKwargs | None = None) -> None:
        super().__init__(state)
        self.kwargs = kwargs or DistributedDataParallelKwargs()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap ``model``, unless nothing in it is trained; every process gets the main process's weights."""
        if isinstance(model, DistributedDataParallel) or not any(p.requires_grad for p in model.parameters()):
            return model
        device = self.state.device
        ids = [device] if device.type in ("cuda", "xpu") else None
        wrapped = DistributedDataParallel(model, device_ids=ids, **self.kwargs.to_kwargs())
        hold_open(wrapped)
        self.kwargs.register_comm_hook(wrapped)
        return wrapped

    @property
    def own_buffers(self) -> bool:
        """See `Strategy.own_buffers`."""
        return not self.kwargs.broadcast_buffers

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager whose backward passes do not synchronize gradients."""
        wrapped = data_parallel(model)
        return nullcontext() if wrapped is None else wrapped.no_sync()

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which processes without batches join the others' gradient reductions."""
        return Join([wrapped for model in models if (wrapped := data_parallel(model)) is not None])


@contextmanager
def sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
    """Synchronize ``model`` in the block's backward passes, even after a forward under ``no_sync``."""
    wrapped = data_parallel(model)
    if wrapped is None:
        yield
        return
    previous = wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync
    wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
    # The last step of a synchronizing forward: without it the reducer does not expect these gradients.
    wrapped.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync = previous
