"""Copying of tensors from a file to a run's objects one by one, so that no second copy of the state is ever
held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.checkpoint.tensors import bring, let_go
from accel.pytree import map_nested


def load_module(module: torch.nn.Module, state: dict[str, Any], **kwargs: Any) -> Any:
    """Call ``module.load_state_dict`` with a ``state`` of memory-mapped tensors.

    Each submodule's pages are read just before it is loaded and evicted afterwards: the extra memory is at most
    the size of the largest submodule.
    """
    if kwargs.get("assign"):
        state = {name: _own(value) for name, value in state.items()}  # else the file would be the parameters
        return module.load_state_dict(state, **kwargs)
    pages = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    handles = []
    for prefix, part in module.named_modules():
        names = [f"{prefix}.{name}" if prefix else name for name in (*part._parameters, *part._buffers)]
        mine = [pages[name] for name in names if name in pages]
        if mine:
            handles.append(part.register_load_state_dict_pre_hook(_for_each(bring, mine)))
            handles.append(part.register_load_state_dict_post_hook(_for_each(let_go, mine)))
    try:
        return module.load_state_dict(state, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _for_each(action: Callable[[torch.Tensor], None], pages: list[torch.Tensor]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for tensor in pages:
            action(tensor)

    return hook


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def owned(state: Any, mapped: bool) -> Any:
    """Return ``state`` with every memory-mapped tensor copied to memory of its own."""
    if not mapped:
        return state

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        copied = leaf.clone()
        let_go(leaf)
        return copied

    return map_nested(take, state)


def load_optimizer(optimizer: Any, state: dict[str, Any], mapped: bool) -> None:
    """Call ``optimizer.load_state_dict(state)``, reusing the memory of the optimizer's present state where it fits.

    ``mapped``: the tensors of ``state`` are memory-mapped. Raises the optimizer's error for a state that does not
    fit.
    """
    parameters = _parameters(optimizer, state)
    if parameters is None:
        optimizer.load_state_dict(owned(state, mapped))
        return
    placed = {
        number: _place(entry, optimizer.state.get(parameters.get(number), {}), parameters.get(number), mapped)
        for number, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": placed})


def _parameters(optimizer: Any, state: Any) -> dict[Any, torch.Tensor] | None:
    """Map the parameter numbers in ``state`` to parameters; return ``None`` if the two do not correspond."""
    try:
        saved = [group["params"] for group in state["param_groups"]]
        present = [group["params"] for group in optimizer.param_groups]
        if not isinstance(state["state"], dict) or list(map(len, saved)) != list(map(len, present)):
            return None
        return {
            number: parameter
            for numbers, parameters in zip(saved, present, strict=True)
            for number, parameter in zip(numbers, parameters, strict=True)
        }
    except (KeyError, TypeError, AttributeError):
        return None


def _place(entry: Any, present: Any, parameter: torch.Tensor | None, mapped: bool) -> Any:
    if not isinstance(entry, dict):
        return owned(entry, mapped)
    placed = {}
    for name, value in entry.items():
        held = present.get(name) if isinstance(present, dict) else None
        if not isinstance(value, torch.Tensor):
            placed[name] = owned(value, mapped)
            continue
        if mapped:
            bring(value)
        if _fits(held, value):
            placed[name] = held.copy_(value)  # type: ignore[union-attr]
        else:
            # Steps are counted where the optimizer wants them; the rest lies beside its parameter.
            target = parameter.device if parameter is not None and value.ndim else value.device
            placed[name] = value.to(target, copy=mapped)
        if mapped:
            let_go(value)
    return placed


def _fits(held: Any, value: torch.Tensor) -> bool:
    return (
        isinstance(held, torch.Tensor)
        and held.shape == value.shape
        and held.dtype == value.dtype
        and not held.requires_grad
    )
