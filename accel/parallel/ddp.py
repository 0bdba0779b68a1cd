"""Data parallel: every process has the whole model, and gradients are averaged as they become ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accel.errors import ArgumentError
from accel.parallel.base import Strategy
from accel.parallel.unwrap import data_parallel
from accel.plugins import DistributedDataParallelKwargs
from accel.state import PartialState
from accel.world.process_group import hold_open


class DataParallel(Strategy):
    """torch's DistributedDataParallel, with the script's ``DistributedDataParallelKwargs``."""

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
        compress(wrapped, self.kwargs)
        return wrapped

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A region whose backward passes leave gradients on their process."""
        wrapped = data_parallel(model)
        return nullcontext() if wrapped is None else wrapped.no_sync()

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """A region in which a process that has run out of batches answers the others' gradient exchanges."""
        return Join([wrapped for model in models if (wrapped := data_parallel(model)) is not None])


@contextmanager
def sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
    """A region whose backward passes exchange the gradients of ``model``, though its forward ran under ``no_sync``."""
    wrapped = data_parallel(model)
    if wrapped is None:
        yield
        return
    kept = wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync
    wrapped.require_backward_grad_sync = wrapped.require_forward_param_sync = True
    # What a forward with synchronisation does last: without it the reducer does not expect these gradients.
    wrapped.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        wrapped.require_backward_grad_sync, wrapped.require_forward_param_sync = kept


def compress(model: DistributedDataParallel, kwargs: DistributedDataParallelKwargs) -> None:
    """Register the communication hook that ``kwargs`` asks for. Raises `ArgumentError` where torch has a broken one."""
    kind, wrapper = str(kwargs.comm_hook), str(kwargs.comm_wrapper)
    if kind == "no":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    powered = kind.endswith("power_sgd")
    state = powerSGD_hook.PowerSGDState(None, **kwargs.comm_state_option) if powered else None
    if kind == "batched_power_sgd" and not _orthogonalizes(powerSGD_hook):
        raise ArgumentError(f"comm_hook={kind!r} does not work in torch {torch.__version__}: use 'power_sgd'")
    hook = wrappers.get(wrapper, lambda hook: hook)(hooks[kind])
    model.register_comm_hook(state, _unnamed(hook) if "bf16" in (kind, wrapper) else hook)


def _orthogonalizes(hooks: Any) -> bool:
    """Whether torch's own step takes the single matrix that its batched hook gives it, which 2.13 does not."""
    try:
        hooks._orthogonalize(torch.eye(2))
    except AssertionError:
        return False
    return True


def _unnamed(hook: Any) -> Any:
    # torch refuses hooks of certain names without NCCL. Gloo, too, adds bf16.
    if torch.distributed.get_backend() != "gloo":
        return hook
    return lambda state, bucket: hook(state, bucket)
