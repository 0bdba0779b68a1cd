"""Finding the script's own model inside wrappers, compilations and mixed precision."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from accel.precision.amp import restore_forward

_WRAPPERS = (DistributedDataParallel, DataParallel)


def compiled_inside(model: nn.Module) -> nn.Module | None:
    """Return the module from which ``model`` was compiled, as a whole or by its regions, or ``None``."""
    # torch.compile keeps the original as a submodule, `compile_regions` beside them; asking so needs no torch._dynamo.
    found = model._modules.get("_orig_mod")
    return vars(model).get("_orig_mod") if found is None else found


def is_compiled_module(module: nn.Module) -> bool:
    """Return True if ``module`` came from `torch.compile`."""
    return "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule"


def bare(model: nn.Module) -> nn.Module:
    """Return the model inside every wrapper and every compilation of ``model``."""
    while True:
        inside = model.module if isinstance(model, _WRAPPERS) else compiled_inside(model)
        if inside is None:
            return model
        model = inside


def data_parallel(model: nn.Module) -> DistributedDataParallel | None:
    """Return the `DistributedDataParallel` that ``model`` is, or was compiled from, or ``None``."""
    inside = compiled_inside(model)
    found = model if inside is None else inside
    return found if isinstance(found, DistributedDataParallel) else None


def extract_model_from_parallel(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> nn.Module:
    """Return the model inside the wrappers of data-parallel training; ``model`` keeps working.

    Without ``keep_fp32_wrapper`` its forward no longer runs in mixed precision, and without
    ``keep_torch_compile`` the model before compilation is returned. ``recursive`` also unwraps modules inside it,
    in place.
    """
    outer = compiled_inside(model)
    inside = model if outer is None else outer
    while isinstance(inside, _WRAPPERS):
        inside = inside.module
    if recursive:
        _unwrap_children(inside)
    original = compiled_inside(inside)
    if not keep_fp32_wrapper:
        for part in (model, inside, original):
            if part is not None:
                restore_forward(part)
    if not keep_torch_compile:
        return bare(inside)
    if outer is None or original is not None:
        return inside
    return model if outer is inside else _compiled_like(model, inside)


def _unwrap_children(model: nn.Module) -> None:
    for name, child in model.named_children():
        while isinstance(child, _WRAPPERS):
            child = child.module
            setattr(model, name, child)
        _unwrap_children(child)


def _compiled_like(model: nn.Module, inside: nn.Module) -> nn.Module:
    if not is_compiled_module(model):
        while isinstance(model, _WRAPPERS):
            model = model.module
        return model
    # A wrapper of its own: to put `inside` into that of `model` would leave training without its gradient exchange.
    again: nn.Module = type(model)(inside, model.dynamo_ctx)
    return again
