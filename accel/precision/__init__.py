"""Numeric precision: the base class computes in the types the model has, the others override what differs; not how a
model is spread (`parallel`).
"""

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
        raise PrecisionError(f"mixed_precision='fp16' needs a GPU, this process runs on {device}: use 'bf16' or 'no'")
    return HalfPrecision(device, autocast, scaler)
