"""Accelerate's helpers for mixed precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from accel.plugins import AutocastKwargs
from accel.precision import choose_precision
from accel.state import AcceleratorState


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context in this run's mixed precision (`AcceleratorState`); an empty one without ``native_amp``."""
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    return choose_precision(state.mixed_precision, state.device, autocast_kwargs, None).autocast(None)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this machine's kind of accelerator; ``kwargs`` are `torch.amp.GradScaler`'s."""
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return torch.amp.GradScaler(device.type if device is not None else "cuda", **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a `torch.amp.GradScaler`, which also scales the gradients of sharded models."""
    return torch.amp.GradScaler(**kwargs)
