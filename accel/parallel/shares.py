"""Tensors of which each process has a share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def is_spread(value: Any) -> bool:
    """Whether each process has a share of ``value``, of torch's `DTensor` class."""
    return hasattr(value, "placements")


def share(value: Any) -> Any:
    """What this process has of ``value``."""
    return value.to_local() if is_spread(value) else value


def whole(value: Any) -> Any:
    """What all processes have of ``value``, by a collective where each has a share."""
    return value.full_tensor() if is_spread(value) else value


def reshard(model: torch.nn.Module) -> None:
    """Free what passes have left gathered, so that ``model.parameters()`` are the shares."""
    for part in _units(model):
        part.reshard()


def gather_before_inference(model: torch.nn.Module) -> None:
    """Gather each unit of ``model`` before its first pass, if that is in inference mode.

    torch keeps the tensors of the first gathering. If they were of inference mode, training would fail.
    """

    def gather(inside: torch.nn.Module, *_: Any) -> None:
        handle.remove()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                for part in _units(inside):
                    part.unshard()
                    part.reshard()

    handle = model.register_forward_pre_hook(gather, prepend=True)


def _units(model: torch.nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def whole_state(state: Mapping[str, Any], keep: bool) -> dict[str, Any]:
    """``state`` with whole tensors on the CPU, gathered one at a time, where ``keep``; elsewhere nothing.

    Collectives: every process calls it. Names of one tensor have one tensor afterwards too.
    """
    kept: dict[str, Any] = {}
    made: dict[int, Any] = {}
    for name, value in state.items():
        if id(value) not in made:
            found = whole(value)
            made[id(value)] = (found.detach().cpu() if isinstance(found, torch.Tensor) else found) if keep else None
        if keep:
            kept[name] = made[id(value)]
    return kept
