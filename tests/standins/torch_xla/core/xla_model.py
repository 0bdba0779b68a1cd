"""Collectives and generators, over torch.distributed's world where there is one."""

from __future__ import annotations

import torch
import torch.distributed as dist

_seed = 0


def all_reduce(
    reduce_type: str,
    inputs: torch.Tensor | list[torch.Tensor],
    scale: float = 1.0,
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> torch.Tensor | list[torch.Tensor]:
    """In place for a list; a new tensor for a tensor."""
    assert reduce_type == "sum"
    tensors = [inputs.clone()] if isinstance(inputs, torch.Tensor) else inputs
    for tensor in tensors:
        if dist.is_initialized():
            dist.all_reduce(tensor)
        tensor.mul_(scale)
    return tensors[0] if isinstance(inputs, torch.Tensor) else tensors


def broadcast_master_param(model: torch.nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)


def rendezvous(tag: str, payload: bytes = b"", replicas: list[int] = []) -> list[bytes]:  # noqa: B006
    dist.barrier()
    return [payload] * dist.get_world_size()


def set_rng_state(seed: int, device: str | None = None) -> None:
    global _seed
    _seed = seed


def get_rng_state(device: str | None = None) -> int:
    return _seed
