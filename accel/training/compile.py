"""`torch.compile` for whole models, or only for the blocks that a model repeats.

`torch._dynamo` is imported by the first call of `torch.compile`, not here.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, cast

import torch
from torch import nn

from accel.enums import DynamoBackend
from accel.errors import ArgumentError
from accel.parallel.unwrap import compiled_inside, is_compiled_module
from accel.plugins import TorchDynamoPlugin


def dynamo(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the compilation plug-in of `Accelerator`. Raises `ArgumentError` if two settings are given."""
    if plugin is None:
        return TorchDynamoPlugin(backend=backend)  # type: ignore[arg-type]
    if backend is not None:
        raise ArgumentError("pass Accelerator(dynamo_backend=…) or dynamo_plugin, not both")
    if not isinstance(plugin, TorchDynamoPlugin):
        raise ArgumentError(f"Accelerator(dynamo_plugin=…) must be a TorchDynamoPlugin, got a {type(plugin).__name__}")
    return plugin


def compiles(plugin: TorchDynamoPlugin, model: nn.Module, *, regions: bool) -> bool:
    """Return True if ``plugin`` is to compile ``model``, by regions or as a whole, and it is not compiled yet."""
    enabled = plugin.backend != DynamoBackend.NO and bool(plugin.use_regional_compilation) is regions
    return enabled and compiled_inside(model) is None and not has_compiled_regions(model)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return True if ``module`` or a module in it was compiled by `torch.compile`."""
    return any(is_compiled_module(part) for part in module.modules())


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return True for a `torch.nn.ModuleList`, not empty, of modules of one class."""
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(block, module[0].__class__) for block in module)
    )


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return True if ``module`` is or contains, at any depth, a list of repeated blocks."""
    return any(is_repeated_blocks(part) for part in module.modules())


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Return a module like ``module`` with its repeated blocks, and the modules next to them, compiled one by one.

    Blocks of one class and the same shapes share the compiled code of the first, so that a deep model is ready
    about as soon as a shallow one. The parameters are those of ``module``, which is unchanged and returned by
    `unwrap_model`. ``compile_kwargs`` are those of `torch.compile`.
    """
    compiled = _compile_regions(module, compile_kwargs)
    if compiled_inside(compiled) is None:
        vars(compiled)["_orig_mod"] = module
    return compiled


def _compile_regions(module: nn.Module, compile_kwargs: dict[str, Any]) -> nn.Module:
    if is_repeated_blocks(module):
        return nn.ModuleList([torch.compile(block, **compile_kwargs) for block in module.children()])  # type: ignore[misc]
    if not has_repeated_blocks(module):
        return cast(nn.Module, torch.compile(module, **compile_kwargs))
    replacement = module.__class__.__new__(module.__class__)
    vars(replacement).update(vars(module))
    for name, value in list(vars(replacement).items()):
        vars(replacement)[name] = _rebound(value, module, replacement)
    vars(replacement)["_modules"] = {}
    for name, child in module.named_children():
        replacement.add_module(name, _compile_regions(child, compile_kwargs))
    return replacement


def _rebound(value: Any, module: nn.Module, replacement: nn.Module) -> Any:
    """Rebind a method that was set on ``module``, such as a mixed-precision forward, to ``replacement``."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, replacement)
    bind = getattr(value, "bound_to", None)
    return value if bind is None else bind(module, replacement)


def compile_regions_in_place(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile in place what `compile_regions` compiles in a copy. Return ``module``, which keeps its hooks."""
    if is_repeated_blocks(module):
        for block in module.children():
            block.compile(**compile_kwargs)
    elif has_repeated_blocks(module):
        for child in module.children():
            compile_regions_in_place(child, **compile_kwargs)
    else:
        module.compile(**compile_kwargs)
    return module
