"""Numeric precision: a base class that computes in the model's own types, and mixed precision over it."""

from __future__ import annotations

import torch

from accel.errors import PrecisionError
from accel.plugins import AutocastKwargs, GradScalerKwargs
from accel.precision.amp import HalfPrecision, LowPrecision
from accel.precision.base import Precision
from accel.state import PartialState
from accel.world import xla

__all__ = ["HalfPrecision", "LowPrecision", "Precision", "choose_precision"]


def choose_precision(
    name: str, device: torch.device, autocast: AutocastKwargs | None = None, scaler: GradScalerKwargs | None = None
) -> Precision:
    """Return the precision called ``name`` on ``device``. Raises `PrecisionError` if the device lacks it."""
    if name == "no":
        return Precision(device)
    if name == "fp8":
        raise PrecisionError("mixed_precision='fp8' is not in this version of accel: use 'bf16', 'fp16' or 'no'")
    if name == "bf16" and PartialState._shared_state.get("backend") == xla.BACKEND:
        return Precision(device)  # torch_xla keeps all floats in bfloat16 itself
    if name == "bf16":
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise PrecisionError(f"mixed_precision='bf16' is not supported by {device}: use 'fp16' or 'no'")
        return LowPrecision(device, torch.bfloat16, autocast)
    if device.type not in ("cuda", "xpu"):
        raise PrecisionError(f"mixed_precision='fp16' needs a GPU, but this process uses {device}: use 'bf16' or 'no'")
    return HalfPrecision(device, autocast, scaler)
