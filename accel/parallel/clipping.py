"""Clipping of sharded gradients, over one device mesh or several."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accel import collectives
from accel.parallel.shares import full_tensor, share


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
    """Group ``parameters`` into lists for one operation each: those of one device mesh, or of none."""
    groups: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        groups[getattr(parameter, "device_mesh", None)].append(parameter)
    return list(groups.values())
