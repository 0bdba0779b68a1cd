"""Optimizers of sharded models, which step the shards with their original groups and state, and gradient clipping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from accel import collectives
from accel.errors import ArgumentError
from accel.parallel.shares import full_tensor, is_sharded, share


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


# Clipping of sharded gradients, over one device mesh or several.


def clip_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Clip gradients in place to a joint norm, over all shards, of at most ``max_norm``; return the norm before.

    ``parameters``: those that have a gradient.

    Collective: all processes must call it.
    """
    groups = by_mesh(parameters)
    total = _largest(groups, device) if norm_type == math.inf else _norm(groups, norm_type, device)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(groups: Sequence[Sequence[Any]], norm_type: float, device: torch.device) -> torch.Tensor:
    norms = [full_tensor(torch.nn.utils.get_total_norm([p.grad for p in group], norm_type)) for group in groups]
    if not norms:
        return torch.tensor(0.0, device=device)
    total_norm: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total_norm


def _largest(groups: Sequence[Sequence[Any]], device: torch.device) -> torch.Tensor:
    """Return the infinity norm. torch's own rejects empty shards, which small parameters have on some ranks."""
    shares = [share(p.grad) for group in groups for p in group]
    maxima = [part.abs().max().to(device, torch.float64) for part in shares if part.numel()]
    largest = torch.stack(maxima).max() if maxima else torch.zeros((), dtype=torch.float64, device=device)
    global_largest: torch.Tensor = collectives.reduce(largest, "max")
    return global_largest.to(shares[0].dtype) if shares else global_largest.float()


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[Any]]:
    """Group ``parameters`` by device mesh: one operation takes only one mesh, or only plain tensors."""
    groups: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())
