"""Optimizers of sharded models, which step the shards with their original groups and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from accel.errors import ArgumentError
from accel.parallel.shares import is_sharded


def rebind_to_shards(optimizer: torch.optim.Optimizer, shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Make ``optimizer`` step the shards instead of the original parameters."""
    for group in optimizer.param_groups:
        group["params"][:] = [shards.get(p, p) for p in group["params"]]  # LBFGS keeps this list
    for parameter in list(optimizer.state):
        shard = shards.get(parameter, parameter)
        if shard is not parameter:
            state = optimizer.state.pop(parameter)
            optimizer.state[shard] = {name: _shard_state(value, shard) for name, value in state.items()}


def check_known_parameters(
    optimizer: torch.optim.Optimizer, known_parameters: Callable[[], Iterable[torch.Tensor]]
) -> None:
    """Make the first step raise `ArgumentError` for a trained parameter that is not in ``known_parameters()``."""

    def check(stepped: torch.optim.Optimizer, *_: Any) -> None:
        handle.remove()
        known_ids = {id(parameter) for parameter in known_parameters()}
        for parameter in (p for group in stepped.param_groups for p in group["params"] if p.requires_grad):
            if id(parameter) not in known_ids:
                raise ArgumentError(
                    f"{type(stepped).__name__}: a parameter of shape {tuple(parameter.shape)} belongs to no prepared "
                    "model, so its steps would change nothing: prepare its model too, or list model.parameters() "
                    "after prepare"
                )

    handle = optimizer.register_step_pre_hook(check)


def _shard_state(value: Any, shard: Any) -> Any:
    """Return the part of a parameter's optimizer state that belongs to its shard."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, torch.Tensor) or value.shape != shard.shape or not is_sharded(shard):
        return value
    return distribute_tensor(value.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)
