"""Data parallel: every process has the full model, and gradients are averaged as they become ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accel.errors import ArgumentError
from accel.parallel.base import Strategy, average_gradients
from accel.parallel.mesh import Mesh
from accel.parallel.shares import is_split
from accel.parallel.tensor import check_spread
from accel.parallel.unwrap import data_parallel
from accel.plugins import DistributedDataParallelKwargs
from accel.state import GradientState, PartialState
from accel.world.process_group import hold_open


class DataParallel(Strategy):
    """torch's DistributedDataParallel, with the script's ``DistributedDataParallelKwargs``."""

    joins = True

    def __init__(
        self, state: PartialState, kwargs: DistributedDataParallelKwargs | None = None, mesh: Mesh | None = None
    ) -> None:
        super().__init__(state, mesh)
        self.kwargs = kwargs or DistributedDataParallelKwargs()
        # A model → the parameters that DDP does not synchronize, as they were not trained when it was prepared.
        self._frozen: WeakKeyDictionary[torch.nn.Module, list[torch.nn.Parameter]] = WeakKeyDictionary()

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap ``model``, unless nothing in it is trained; every process gets the main process's weights."""
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        if frozen:
            self._frozen[model] = frozen
        if data_parallel(model) is not None or not any(p.requires_grad for p in model.parameters()):
            return model
        if is_split(model):  # it reduces its gradients itself
            check_spread(model, tp_size=1)
            if getattr(model, "is_distributed_loading_by_transformers", False):
                size = self.state.num_processes
                raise ArgumentError(
                    f"prepare: from_pretrained has sharded the {type(model).__name__} over {size} processes: pass "
                    f"parallelism_config=ParallelismConfig(dp_shard_size={size}) to the Accelerator"
                )
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
        # The first pass of a static graph must synchronize: it counts the uses of each parameter.
        if wrapped is None or (wrapped.static_graph and not wrapped._static_graph_delay_allreduce_enqueued):
            return nullcontext()
        return wrapped.no_sync()

    def after_backward(self) -> None:
        """Average the gradients of parameters that were unfrozen after their model was prepared. Idempotent."""
        if self._frozen:
            average_gradients(parameter for frozen in self._frozen.values() for parameter in frozen)

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which processes without batches join the others' gradient reductions.

        Raises `ArgumentError` with accumulation: a process that ended within a window would keep its gradients.
        """
        steps = GradientState().num_steps
        if steps > 1:
            raise ArgumentError(
                f"join_uneven_inputs: processes must not end within a window of {steps} accumulated batches: "
                "remove it and keep even_batches=True, or do not accumulate"
            )
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
