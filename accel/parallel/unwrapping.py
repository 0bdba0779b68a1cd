"""Finding the script's own model inside what wrapping, compiling and mixed precision made of it."""

from __future__ import annotations

import torch

from accel.parallel.base import Strategy
from accel.precision.amp import restore_forward


def _compiled_inside(model: torch.nn.Module) -> torch.nn.Module | None:
    # torch.compile's module holds the original as `_orig_mod`; asking so needs no import of torch._dynamo.
    return model._modules.get("_orig_mod")


def unwrap(strategy: Strategy, model: torch.nn.Module, keep_precision: bool, keep_compiled: bool) -> torch.nn.Module:
    """Return the model inside ``model``; see `Accelerator.unwrap_model`."""
    outer = _compiled_inside(model)
    inside = strategy.unwrap(model if outer is None else outer)
    compiled = _compiled_inside(inside)
    if not keep_precision:
        restore_forward(inside if compiled is None else compiled)
    if compiled is not None:
        return inside if keep_compiled else compiled
    if outer is not None and keep_compiled:
        model._modules["_orig_mod"] = inside
        return model
    return inside
