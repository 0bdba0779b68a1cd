"""Helpers for sharded tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def is_sharded(value: Any) -> bool:
    """Return True if ``value`` is a `DTensor`: each process has a shard of it."""
    return hasattr(value, "placements")


def share(value: Any) -> Any:
    """Return this process's shard of ``value``."""
    return value.to_local() if is_sharded(value) else value


def full_tensor(value: Any) -> Any:
    """Return the full ``value``, by a collective if it is sharded."""
    return value.full_tensor() if is_sharded(value) else value


def reshard(model: torch.nn.Module) -> None:
    """Free parameters that passes left gathered, so that ``model.parameters()`` are the shards."""
    for part in _units(model):
        part.reshard()


def gather_before_inference(model: torch.nn.Module) -> None:
    """Gather each unit once outside inference mode, if the first pass of ``model`` is in that mode.

    torch keeps the tensors of the first gathering. Training would fail with tensors of inference mode.
    """

    def gather(module: torch.nn.Module, *_: Any) -> None:
        handle.remove()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                for part in _units(module):
                    part.unshard()
                    part.reshard()

    handle = model.register_forward_pre_hook(gather, prepend=True)


def _units(model: torch.nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def full_state(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """Return ``state`` with full tensors on the CPU, gathered one at a time, if ``keep``; else an empty dict.

    Collective: all processes must call it. Names that share a tensor still do afterwards.
    """
    gathered: dict[str, Any] = {}
    by_id: dict[int, Any] = {}
    for name, value in state.items():
        if id(value) not in by_id:
            full = full_tensor(value)
            by_id[id(value)] = (full.detach().cpu() if isinstance(full, torch.Tensor) else full) if keep else None
        if keep:
            gathered[name] = by_id[id(value)]
    return gathered
