"""Device names, and moving nested tensors to a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from accel.errors import ArgumentError
from accel.pytree import honor_type, rebuild_mapping

# ``0``, ``"cuda:0"``, ``torch.device("cuda", 0)``; ``"disk"`` in device maps, which torch does not know.
Device = int | str | torch.device

META = torch.device("meta")
CPU = torch.device("cpu")


def as_device(device: Device) -> torch.device:
    """Return the `torch.device` for ``device``; an integer is the index of an accelerator of this machine.

    Raises `ArgumentError` for a name that torch does not know, and for a number without an accelerator.
    """
    if isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except RuntimeError:
        pass
    if isinstance(device, int):
        raise ArgumentError(f"device {device}: this machine has no accelerator: use 'cpu', 'disk' or 'meta'")
    raise ArgumentError(f"device {device!r} is unknown to torch: use 'cpu', 'meta', an index or a name like 'cuda:0'")


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return True if two devices are the same; ``cuda`` without a number is ``cuda:0``, as for every accelerator."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator, such as ``cuda``, or ``None``."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type


def is_offload(device: Device) -> bool:
    """Return True if weights are only stored on ``device`` (``"cpu"``, ``"disk"``), not computed with."""
    return device in ("cpu", "disk") or (isinstance(device, torch.device) and device.type == "cpu")


def dtype_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Parse ``"float16"`` or ``"torch.float16"``. Raises `ArgumentError` for an unknown name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    torch_dtype = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ArgumentError(
            f"dtype {dtype!r} is unknown to torch: use, for example, 'float16', 'bfloat16' or 'float32'"
        )
    return torch_dtype


# Nested tensors: the arguments and results of a forward.

_LEAVES = frozenset({type(None), bool, int, float, str, bytes})


def move(data: Any, device: torch.device, skip_keys: str | Collection[str] | None = None) -> Any:
    """Return ``data`` with its tensors, and other objects that have a ``to`` method, on ``device``.

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
    return honor_type(data, (items.get(index, item) for index, item in enumerate(data))) if items else data


def _changed(items: Iterable[tuple[Any, Any]], device: torch.device, skip: Collection[str]) -> dict[Any, Any]:
    """Return the ``items`` that moved, on the new device."""
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
        device = device_of_first(item)
        if device is not None:
            return device
    return None
