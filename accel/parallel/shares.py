"""Helpers for sharded tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from accel import collectives
from accel.errors import CheckpointError
from accel.precision.float8 import without_cast
from accel.state import PartialState


def is_sharded(value: Any) -> bool:
    """Return True if ``value`` is a `DTensor`: each process has a shard of it."""
    return hasattr(value, "placements")


def is_split(model: torch.nn.Module) -> bool:
    """Return True if a parameter of ``model`` is a `DTensor`."""
    return any(map(is_sharded, model.parameters()))


def share(value: Any) -> Any:
    """Return this process's shard of ``value``, with elements of its own type if FSDP gathers it in 8 bits."""
    return without_cast(value.to_local()) if is_sharded(value) else value


def full_tensor(value: Any) -> Any:
    """Return the full ``value``, by a collective if it is sharded."""
    return value.full_tensor() if is_sharded(value) else value


def count_versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return, for each tensor that is not sharded, 1 if it is equal on all processes, else the number of processes.

    Collective: all processes must call it. Raises `CheckpointError` on all for a name that some of them lack.
    """
    plain = {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor)}
    if PartialState().num_processes == 1:
        return dict.fromkeys(plain, 1)
    digests: list[dict[str, str]] = collectives.all_objects({name: _digest(tensor) for name, tensor in plain.items()})
    for name in {name: None for names in digests for name in names}:
        missing = [rank for rank, names in enumerate(digests) if name not in names]
        if missing:
            raise CheckpointError(f"{name} cannot be saved: process {missing[0]} has none, but others do")
    return {name: 1 if len({names[name] for names in digests}) == 1 else len(digests) for name in plain}


def refuse_versions(versions: Mapping[str, int]) -> None:
    """Raise `CheckpointError` for a tensor that differs between processes, where only one can be kept."""
    name = next((name for name, count in versions.items() if count > 1), None)
    if name is not None:
        raise CheckpointError(
            f"{name} is not sharded and differs between processes, and a full state dict holds one value: use "
            "save_state with SHARDED_STATE_DICT"
        )


def _digest(tensor: torch.Tensor) -> str:
    elements = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(memoryview(elements.numpy().data))
    return digest.hexdigest()


def drop_held_gradients(model: torch.nn.Module) -> None:
    """Drop the gradients that torch holds back in an accumulation window, which ``zero_grad`` does not."""
    for unit in _units(model):
        state = unit._get_fsdp_state()
        for group in getattr(state, "_fsdp_param_groups", None) or filter(None, [state._fsdp_param_group]):
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # after the first gathering
                    parameter._unsharded_param.grad = None


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
