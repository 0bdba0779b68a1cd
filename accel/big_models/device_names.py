"""Devices by name, number or `torch.device`, and types by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from accel.errors import ArgumentError

Device = int | str | torch.device
DeviceMap = Mapping[str, Device]

META = torch.device("meta")
CPU = torch.device("cpu")


def as_device(device: Device) -> torch.device:
    """Return the `torch.device` for ``device``; a whole number counts this machine's accelerators.

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
    raise ArgumentError(f"device {device!r} is none that torch knows: use 'cpu', 'meta', a number or, say, 'cuda:0'")


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return True if two devices are the same; ``cuda`` without a number is ``cuda:0``, as for every accelerator."""
    if first_device.type != second_device.type:
        return False
    return first_device.type == "cpu" or (first_device.index or 0) == (second_device.index or 0)


def accelerator_type() -> str | None:
    """Return the type of this machine's accelerator, such as ``cuda``, or ``None``."""
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


def is_offload(device: Device) -> bool:
    """Return True if weights are only stored on ``device`` (``"cpu"``, ``"disk"``), not computed with."""
    return device in ("cpu", "disk") or (isinstance(device, torch.device) and device.type == "cpu")


def dtype_named(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the torch type called ``"float16"`` or ``"torch.float16"``. Raises `ArgumentError` for another word."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(f"dtype {dtype!r} is no type of torch: use, say, 'float16', 'bfloat16' or 'float32'")
    return found
