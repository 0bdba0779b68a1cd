"""Moving the nested arguments and results of a forward between devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from accel.pytree import honor_type, rebuild_mapping

_LEAVES = frozenset({type(None), bool, int, float, str, bytes})


def move(data: Any, device: torch.device, skip_keys: str | Collection[str] | None = None) -> Any:
    """Return ``data`` with its tensors, and all else that has a ``to`` method, on ``device``.

    Values of mappings under ``skip_keys`` stay as they are. If nothing moves, ``data`` itself is returned.
    """
    if type(data) in (tuple, dict) and not data:
        return data
    skip = () if skip_keys is None else (skip_keys,) if isinstance(skip_keys, str) else skip_keys
    return _move(data, device, skip)


def _move(data: Any, device: torch.device, skip: Collection[str]) -> Any:
    if isinstance(data, torch.Tensor):
        return data if data.device == device else data.to(device)
    kind = type(data)
    if kind in _LEAVES:
        return data
    if kind is not tuple and kind is not list and kind is not dict:
        if hasattr(data, "to"):
            return data.to(device)
        if isinstance(data, Mapping):
            items = _changed(data.items(), device, skip)
            return rebuild_mapping(data, {**data, **items}) if items else data
        if not isinstance(data, (list, tuple)):
            return data
    if kind is dict:
        items = _changed(data.items(), device, skip)
        return {**data, **items} if items else data
    items = _changed(enumerate(data), device, ())
    return honor_type(data, (items.get(at, item) for at, item in enumerate(data))) if items else data


def _changed(items: Iterable[tuple[Any, Any]], device: torch.device, skip: Collection[str]) -> dict[Any, Any]:
    """Return those of ``items`` that moved, on the new device."""
    changed = {}
    for key, item in items:
        moved = item if key in skip else _move(item, device, skip)
        if moved is not item:
            changed[key] = moved
    return changed


def device_of_first(data: Any) -> torch.device | None:
    """Return the device of the first tensor in ``data``, or ``None``."""
    if isinstance(data, torch.Tensor):
        return data.device
    items = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    for item in items:
        found = device_of_first(item)
        if found is not None:
            return found
    return None
