"""Numeric precision: a base class that computes in the model's own types, and mixed precision over it."""

from __future__ import annotations

import os

import torch

from accel.enums import FP8BackendType
from accel.errors import ArgumentError, PrecisionError, one_of
from accel.fp8_recipes import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel.kwargs import KwargsHandler
from accel.plugins import AutocastKwargs, GradScalerKwargs
from accel.precision.amp import HalfPrecision, LowPrecision
from accel.precision.base import Precision
from accel.precision.float8 import Float8
from accel.precision.transformer_engine import TransformerEngine
from accel.state import PartialState
from accel.world import xla
from accel.world.available import is_torchao_available, is_transformer_engine_available

__all__ = ["Float8", "HalfPrecision", "LowPrecision", "Precision", "TransformerEngine", "choose_precision"]

_CAPABILITY = (8, 9)  # of the first NVIDIA GPUs that multiply in 8 bits


def choose_precision(
    name: str,
    device: torch.device,
    autocast: AutocastKwargs | None = None,
    scaler: GradScalerKwargs | None = None,
    recipe: KwargsHandler | None = None,
) -> Precision:
    """Return the precision called ``name`` on ``device``; ``recipe``: settings of 8 bits.

    Raises `PrecisionError` if the device lacks it, and `ArgumentError` for a ``recipe`` of another precision.
    """
    if name == "fp8":
        return _choose_8_bits(device, autocast, recipe)
    if recipe is not None:
        raise ArgumentError(
            f"kwargs_handlers: {type(recipe).__name__} is for mixed_precision='fp8', and this run has {name!r}: "
            "change one of them"
        )
    if name == "no":
        return Precision(device)
    if name == "bf16" and PartialState._shared_state.get("backend") == xla.BACKEND:
        return Precision(device)  # torch_xla keeps all floats in bfloat16 itself
    if name == "bf16":
        if device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise PrecisionError(f"mixed_precision='bf16' is not supported by {device}: use 'fp16' or 'no'")
        return LowPrecision(device, torch.bfloat16, autocast)
    if device.type not in ("cuda", "xpu"):
        raise PrecisionError(f"mixed_precision='fp16' needs a GPU, but this process uses {device}: use 'bf16' or 'no'")
    return HalfPrecision(device, autocast, scaler)


def _choose_8_bits(device: torch.device, autocast: AutocastKwargs | None, recipe: KwargsHandler | None) -> Precision:
    backend = _backend(recipe)
    if backend == FP8BackendType.MSAMP:
        raise PrecisionError(
            "mixed_precision='fp8' with MS-AMP, which is no longer developed, is not supported: use torchao "
            "(AORecipeKwargs, ACCELERATE_FP8_BACKEND=AO)"
        )
    if device.type not in ("cpu", "cuda", "xpu", "hpu"):
        raise PrecisionError(f"mixed_precision='fp8' is not supported by {device}: use 'bf16' or 'no'")
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        needed, present = (".".join(map(str, version)) for version in (_CAPABILITY, capability))
        raise PrecisionError(
            f"mixed_precision='fp8' needs compute capability {needed}, and {device} "
            f"({torch.cuda.get_device_name(device)}) has {present}: use 'bf16'"
        )
    if backend == FP8BackendType.TE:
        if not is_transformer_engine_available():
            raise PrecisionError(
                "mixed_precision='fp8': Transformer Engine is not installed: pip install "
                "'transformer-engine[pytorch]', or use torchao (ACCELERATE_FP8_BACKEND=AO)"
            )
        return TransformerEngine(device, recipe if isinstance(recipe, TERecipeKwargs) else TERecipeKwargs(), autocast)
    if not is_torchao_available():
        raise PrecisionError("mixed_precision='fp8' needs torchao 0.6.1 or newer: pip install 'accel-launch[fp8]'")
    return Float8(device, recipe if isinstance(recipe, AORecipeKwargs) else AORecipeKwargs(), autocast)


def _backend(recipe: KwargsHandler | None) -> FP8BackendType:
    """Return the library of ``recipe``, else of ``ACCELERATE_FP8_BACKEND``, else torchao if it is installed."""
    if isinstance(recipe, FP8RecipeKwargs):
        return FP8BackendType(recipe.backend)
    kinds = {
        AORecipeKwargs: FP8BackendType.AO,
        TERecipeKwargs: FP8BackendType.TE,
        MSAMPRecipeKwargs: FP8BackendType.MSAMP,
    }
    if recipe is not None:
        return kinds[type(recipe)]
    word = os.environ.get("ACCELERATE_FP8_BACKEND", "").upper()
    if word not in ("", "NO"):
        known = [backend.value for backend in kinds.values()]
        return FP8BackendType(one_of(word, known, source="environment variable ACCELERATE_FP8_BACKEND"))
    only_engine = is_transformer_engine_available() and not is_torchao_available()
    return FP8BackendType.TE if only_engine else FP8BackendType.AO
