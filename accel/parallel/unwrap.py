"""Finding the script's own model inside wrappers, compilations and mixed precision."""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel.parallel.megatron_engine import MegatronEngine
from accel.precision.amp import restore_forward

_WRAPPERS = (DistributedDataParallel, DataParallel, MegatronEngine)


def _is_wrapper(model: nn.Module) -> bool:
    if isinstance(model, _WRAPPERS):
        return True
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    return engine is not None and isinstance(model, engine)


def compiled_inside(model: nn.Module) -> nn.Module | None:
    """Return the module from which ``model`` was compiled, as a whole or by its regions, or ``None``."""
    # torch.compile stores the original as a submodule, `compile_regions` as an attribute. No torch._dynamo is needed.
    original = model._modules.get("_orig_mod")
    return vars(model).get("_orig_mod") if original is None else original


def is_compiled_module(module: nn.Module) -> bool:
    """Return True if ``module`` came from `torch.compile`."""
    return "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside every wrapper and every compilation of ``model``."""
    while True:
        inner: Any = model.module if _is_wrapper(model) else compiled_inside(model)
        if inner is None:
            return model
        model = inner


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that ``model`` is, or was compiled from, or ``None``."""
    original = compiled_inside(model)
    module = model if original is None else original
    return module if isinstance(module, DistributedDataParallel) else None


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside the wrappers of data-parallel training; ``model`` keeps working.

    Without ``keep_fp32_wrapper`` its forward no longer runs in mixed precision, and without
    ``keep_torch_compile`` the model before compilation is returned. ``recursive`` also unwraps modules inside it,
    in place.
    """
    uncompiled = compiled_inside(model)
    inner = model if uncompiled is None else uncompiled
    while _is_wrapper(inner):
        inner = cast(nn.Module, inner.module)
    if recursive:
        _unwrap_children(inner)
    original = compiled_inside(inner)
    if not keep_fp32_wrapper:
        for part in (model, inner, original):
            if part is not None:
                restore_forward(part)
    if not keep_torch_compile:
        return unwrap(inner)
    if uncompiled is None or original is not None:
        return inner
    return model if uncompiled is inner else _compiled_like(model, inner)


def _unwrap_children(model: nn.Module) -> None:
    for name, child in model.named_children():
        while _is_wrapper(child):
            child = cast(nn.Module, child.module)
            setattr(model, name, child)
        _unwrap_children(child)


def _compiled_like(model: nn.Module, inner: nn.Module) -> nn.Module:
    if not is_compiled_module(model):
        while _is_wrapper(model):
            model = cast(nn.Module, model.module)
        return model
    # A new wrapper: with `inner` in the wrapper of `model`, training would no longer exchange gradients.
    compiled: nn.Module = type(model)(inner, model.dynamo_ctx)
    return compiled
