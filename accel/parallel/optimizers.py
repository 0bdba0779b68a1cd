"""Optimizers of sharded models, which step the shards with their original groups and state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accel.errors import ArgumentError
from accel.parallel.clipping import by_mesh
from accel.parallel.shares import is_sharded


def to_shards(parameters: Iterable[torch.Tensor], shards: Mapping[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """Return the shard of each of ``parameters`` that was listed before `prepare`, and the others as they are."""
    return [p if is_sharded(p) else shards.get(p, p) for p in parameters]


def rebind_to_shards(optimizer: torch.optim.Optimizer, shards: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Make ``optimizer`` step the shards instead of the original parameters."""
    for group in optimizer.param_groups:
        group["params"][:] = to_shards(group["params"], shards)  # LBFGS keeps this list
    for parameter in list(optimizer.state):
        (shard,) = to_shards([parameter], shards)
        if shard is not parameter:
            state = optimizer.state.pop(parameter)
            optimizer.state[shard] = {name: _shard_state(value, shard) for name, value in state.items()}


def check_known(user: str, parameters: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> None:
    """Raise `ArgumentError` for a trained parameter that is not in ``known``. ``user``: what it was passed to."""
    known_ids = {id(parameter) for parameter in known}
    for parameter in parameters:
        if not parameter.requires_grad or id(parameter) in known_ids:
            continue
        if parameter.numel() and not is_sharded(parameter) and not parameter.untyped_storage().size():
            raise ArgumentError(
                f"{user}: these parameters were listed while the model had them gathered: pass model.parameters()"
            )
        raise ArgumentError(
            f"{user}: a parameter of shape {tuple(parameter.shape)} belongs to no prepared model, so nothing would "
            "change: prepare its model too, or list model.parameters() after prepare"
        )


@contextmanager
def split_by_mesh(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Split the groups of ``optimizer`` in the block, so that each has the parameters of one device mesh, or of none.

    torch's foreach and fused steps do not take both in one group. What the steps write into a group is kept.
    """
    groups = optimizer.param_groups
    split = [[{**group, "params": part} for part in by_mesh(group["params"])] for group in groups]
    optimizer.param_groups = [part for parts in split for part in parts]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for group, parts in zip(groups, split, strict=True):
            for part in parts:
                group.update({**part, "params": group["params"]})


def _shard_state(value: Any, shard: Any) -> Any:
    """Return the part of a parameter's optimizer state that belongs to its shard."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, torch.Tensor) or value.shape != shard.shape or not is_sharded(shard):
        return value
    return distribute_tensor(value.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)
