"""Layerwise casting: weights are stored in a narrow type and cast to a wide one for each layer's forward."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from accel.big_models.hooks import ModelHook, add_hook_to_module, not_compiled

_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class LayerwiseCastingHook(ModelHook):
    """A hook that casts weights to ``compute_dtype`` for a forward and back to ``storage_dtype`` after it.

    Precision that the storage type lacks is lost when the hook is attached.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    @not_compiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    @not_compiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Attach a `LayerwiseCastingHook` to every linear and convolution layer of ``module``.

    Skipped, with all below them: modules whose path matches (`re.search`) ``skip_modules_pattern``, or one of
    several, and instances of ``skip_modules_classes``.
    """
    patterns = (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    classes = skip_modules_classes or ()
    for layer in _layers(module, "", [re.compile(pattern) for pattern in patterns], classes):
        hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
        add_hook_to_module(layer, hook, append=True)


def _layers(
    module: nn.Module, path: str, patterns: list[re.Pattern[str]], classes: tuple[type[nn.Module], ...]
) -> Iterable[nn.Module]:
    if isinstance(module, classes) or any(pattern.search(path) for pattern in patterns):
        return
    if isinstance(module, _LAYERS):
        yield module
        return
    for name, child in module.named_children():
        yield from _layers(child, f"{path}.{name}" if path else name, patterns, classes)
