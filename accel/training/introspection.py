"""Small helpers for objects, dicts and modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch


def get_pretty_name(obj: object) -> str:
    """Return a name for ``obj``: its qualified name if it has one, else that of its class."""
    for owner in (obj, type(obj)):
        name = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None)
        if name:
            return str(name)
    return str(obj)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge ``source`` into ``destination`` recursively, and return it; on a conflict ``source`` wins."""
    for key, value in source.items():
        if isinstance(value, dict):
            existing = destination.get(key)
            destination[key] = merge_dicts(value, existing if isinstance(existing, dict) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """Return the attribute at the end of a dotted path, such as ``"module.weight"``. Raises `AttributeError`."""
    return reduce(getattr, attr.split("."), obj)


def get_module_children_bottom_up(model: torch.nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return every module in ``model``, each after its children; with ``return_fqns`` as (name, module).

    A module that is used in two places is listed twice, once under each name.
    """
    modules = list(_top_down("", model))[::-1]
    return modules if return_fqns else [module for _, module in modules]


def _top_down(name: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    yield name, module
    for child_name, child in reversed(list(module.named_children())):
        yield from _top_down(f"{name}.{child_name}" if name else child_name, child)


def model_has_dtensor(model: torch.nn.Module) -> bool:
    """Return True if a parameter of ``model`` is a `DTensor`."""
    import sys

    tensor = sys.modules.get("torch.distributed.tensor")  # if not imported, no parameter is one
    return tensor is not None and any(isinstance(parameter, tensor.DTensor) for parameter in model.parameters())
