"""The state of models and optimizers in chunks: splitting for a save, and restoring in a world of any size.

Optimizer state is keyed by parameter names, so that the order of parameters may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from accel.checkpoint.chunks import Saved
from accel.checkpoint.restore import load_optimizer
from accel.errors import CheckpointError
from accel.parallel.shares import is_spread

Names: TypeAlias = Callable[[torch.Tensor], str]


def split_optimizer(optimizer: Any, names: Names) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the state of ``optimizer`` into an outline and, under ``name:key``, the tensors for chunks.

    The outline is the state dict with names in place of numbers; its ``chunked`` lists the keys of the removed
    tensors.
    """
    state = optimizer.state_dict()
    return outline_of(state, _by_number(optimizer, state, names))


def _by_number(optimizer: Any, state: Mapping[str, Any], name: Callable[[torch.Tensor], str]) -> dict[int, str]:
    """Map each parameter number in ``state`` to ``name`` of its parameter."""
    there, here = ([len(group["params"]) for group in side] for side in (state["param_groups"], optimizer.param_groups))
    if there != here:
        raise ValueError(f"its groups have {there} parameters, and {here} in this run")
    return {
        number: name(parameter)
        for saved, present in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(saved["params"], present["params"], strict=True)
    }


def outline_of(state: Mapping[str, Any], names: Mapping[Any, str]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split a state dict as `split_optimizer` does; ``names`` maps its parameter keys to names."""
    outline: dict[str, Any] = {"state": {}, "chunked": {}}
    tensors: dict[str, torch.Tensor] = {}
    for number, entry in state["state"].items():
        name = names[number]
        chunked = [key for key, value in entry.items() if isinstance(value, torch.Tensor) and value.ndim]
        outline["state"][name] = {key: value for key, value in entry.items() if key not in chunked}
        outline["chunked"][name] = chunked
        tensors.update({f"{name}:{key}": entry[key] for key in chunked})
    outline["param_groups"] = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return outline, tensors


def fill_optimizer(optimizer: Any, names: Names, outline: Mapping[str, Any], saved: Saved, prefix: str = "") -> None:
    """Load the result of `split_optimizer` to this process's parts. Raises `CheckpointError` for a mismatch.

    ``prefix``: the prefix of the names in ``saved``.
    """
    groups, state = [], {}
    number = 0
    if len(outline["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{saved.where}: {len(outline['param_groups'])} parameter group(s) there, and "
            f"{len(optimizer.param_groups)} in this run"
        )
    for there, here in zip(outline["param_groups"], optimizer.param_groups, strict=True):
        known = {names(parameter): parameter for parameter in here["params"]}
        odd = sorted(set(there["params"]) ^ set(known))
        if odd:
            raise CheckpointError(f"{saved.where}: {odd[0]} is in a parameter group only there or only in this run")
        for name, parameter in known.items():
            entry = dict(outline["state"].get(name, {}))
            held = optimizer.state.get(parameter, {})
            for key in outline["chunked"].get(name, ()):
                entry[key] = _filled(saved, f"{prefix}{name}:{key}", parameter, held.get(key))
            if entry:
                state[number] = entry
            number += 1
        groups.append({**there, "params": list(range(number - len(known), number))})
    load_optimizer(optimizer, {"state": state, "param_groups": groups}, mapped=False)


def _filled(saved: Saved, name: str, parameter: torch.Tensor, held: Any) -> torch.Tensor:
    if name not in saved:
        raise CheckpointError(f"{saved.where}: {name} is not there")
    shape, dtype = saved.shapes[name], saved.dtype(name)
    if isinstance(held, torch.Tensor) and tuple(held.shape) == shape and held.dtype == dtype:
        made = held
    elif shape == tuple(parameter.shape):
        made = torch.empty_like(parameter.detach(), dtype=dtype)
    else:
        made = torch.empty(shape, dtype=dtype, device=parameter.device)
    saved.fill(name, made)
    return _beside(made, parameter)


def _beside(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return ``value`` in a form that can be combined with ``parameter``: replicated if that is sharded."""
    if is_spread(value) or not is_spread(parameter):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def fill_whole_optimizer(optimizer: Any, state: Mapping[str, Any], where: Path) -> None:
    """Load the state dict of an unsharded optimizer to this process's parts, by the order of parameters."""
    identities = _by_number(optimizer, state, lambda parameter: str(id(parameter)))
    outline, tensors = outline_of(state, identities)
    fill_optimizer(optimizer, lambda parameter: str(id(parameter)), outline, Saved.whole(tensors, str(where)))


def fill_module(
    module: nn.Module, saved: Saved, prefix: str = "", extra: Mapping[str, Any] | None = None, strict: bool = True
) -> None:
    """Load weights and buffers of ``saved`` to this process's parts of ``module``, and ``extra`` as it is.

    Raises `CheckpointError` for a shape that differs and, if ``strict``, for names that only one side has.
    """
    wanted = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    ties = {name: names for names in groups.values() for name in names}
    missing = []
    for name, value in wanted.items():
        found = next((other for other in (name, *ties.get(name, ())) if prefix + other in saved), None)
        if found is None:
            missing.append(name)
        else:
            saved.fill(prefix + found, value)
    unexpected = [name for name in saved.under(prefix) if name not in wanted]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{saved.where}: it lacks {missing[0]}" if missing else f"{saved.where}: this run has no {unexpected[0]}"
        )
    if extra:
        module.load_state_dict(dict(extra), strict=False)
