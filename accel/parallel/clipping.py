"""Clipping gradients of which each process has a share, over one mesh of processes or several."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from accel import collectives
from accel.errors import ArgumentError
from accel.parallel.shares import share, whole


def clip_norm(
    parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float, device: torch.device
) -> torch.Tensor:
    """Scale gradients in place so that their joint norm, over all shares, is at most ``max_norm``; returns it before.

    Collectives: every process calls it.
    """
    groups = by_mesh(parameters)
    total = _largest(groups, device) if norm_type == math.inf else _norm(groups, norm_type, device)
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _norm(groups: Sequence[Sequence[Any]], norm_type: float, device: torch.device) -> torch.Tensor:
    norms = [whole(torch.nn.utils.get_total_norm([p.grad for p in group], norm_type)) for group in groups]
    if not norms:
        return torch.tensor(0.0, device=device)
    found: torch.Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return found


def _largest(groups: Sequence[Sequence[Any]], device: torch.device) -> torch.Tensor:
    """The infinity norm; torch's own refuses a share without elements, which a small parameter leaves to some ranks."""
    shares = [share(p.grad) for group in groups for p in group]
    found = [part.abs().max().to(device, torch.float64) for part in shares if part.numel()]
    largest = torch.stack(found).max() if found else torch.zeros((), dtype=torch.float64, device=device)
    everywhere: torch.Tensor = collectives.reduce(largest, "max")
    return everywhere.to(shares[0].dtype) if shares else everywhere.float()


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[Any]]:
    """The parameters that have a gradient, in lists that one operation can take.

    Raises `ArgumentError` for what is no parameter any more: it held what a pass had gathered.
    """
    found: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
        if parameter.grad is not None:
            found[getattr(parameter.grad, "device_mesh", None)].append(parameter)
        elif parameter.requires_grad and parameter.numel() and not parameter.untyped_storage().size():
            raise ArgumentError(
                "clipping: these parameters were listed while the model had them gathered: give model.parameters()"
            )
    return list(found.values())
