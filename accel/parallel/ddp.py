"""Data parallel: every process has the whole model, and gradients are averaged as they become ready."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from accel.parallel.base import Strategy
from accel.plugins import DistributedDataParallelKwargs
from accel.state import PartialState
from accel.world import hold_open


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
        _compress(wrapped, self.kwargs)
        return wrapped

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model inside."""
        if isinstance(model, DistributedDataParallel):
            inside: torch.nn.Module = model.module
            return inside
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A region whose backward passes leave gradients on their process."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """A region in which a process that has run out of batches answers the others' gradient exchanges."""
        return Join([model for model in models if isinstance(model, DistributedDataParallel)])


def _compress(model: DistributedDataParallel, kwargs: DistributedDataParallelKwargs) -> None:
    """Register the communication hook that ``kwargs`` asks for."""
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
    model.register_comm_hook(state, wrappers.get(wrapper, lambda hook: hook)(hooks[kind]))
