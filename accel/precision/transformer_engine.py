"""8-bit training by NVIDIA's Transformer Engine, through its layers and its autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accel.enums import FP8BackendType
from accel.errors import ArgumentError, PrecisionError
from accel.fp8_recipes import TERecipeKwargs
from accel.plugins import AutocastKwargs
from accel.precision.amp import AutocastForward, LowPrecision
from accel.world.available import is_hpu_available, is_transformer_engine_available


class _EngineForward(AutocastForward):
    """An `AutocastForward` under Transformer Engine's autocast, for ``module``."""

    module: nn.Module
    enter: Callable[..., Any]
    in_evaluation: bool

    def bound_to(self, module: nn.Module, replacement: nn.Module) -> AutocastForward:
        """See `AutocastForward.bound_to`."""
        return self.of(replacement, super().bound_to(module, replacement), self.enter, self.in_evaluation)

    @classmethod
    def of(
        cls, module: nn.Module, plain: AutocastForward, enter: Callable[..., Any], in_evaluation: bool
    ) -> _EngineForward:
        """Return ``plain``, the forward of ``module``, under the context manager that ``enter`` returns."""
        forward = cls(plain.forward, plain.device_type, plain.dtype, plain.options)
        forward.module, forward.enter, forward.in_evaluation = module, enter, in_evaluation
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass; in evaluation without 8 bits, unless the recipe says otherwise."""
        with self.enter(enabled=self.in_evaluation or self.module.training):
            return super().__call__(*args, **kwargs)


class TransformerEngine(LowPrecision):
    """bf16 under autocast, with the layers of Transformer Engine in models that are trained."""

    fp8_backend = FP8BackendType.TE
    recipe: TERecipeKwargs

    def __init__(self, device: torch.device, recipe: TERecipeKwargs, autocast: AutocastKwargs | None = None) -> None:
        super().__init__(device, torch.bfloat16, autocast)
        self.recipe = recipe
        _refuse_without_support(device)
        self._enter = partial(_engine().fp8_autocast, fp8_recipe=_recipe(recipe))

    def convert(self, model: nn.Module, compiled: bool = False) -> None:
        """See `Precision.convert`; parameters stay the same objects."""
        if not has_transformer_engine_layers(model):
            convert_model(model)
        if not has_transformer_engine_layers(model):
            raise PrecisionError(
                f"mixed_precision='fp8': the {type(model).__name__} has no layer to convert for Transformer Engine: a "
                "linear one with sizes divisible by 16, or a LayerNorm. Use 'bf16'"
            )

    def wrap_forward(self, model: nn.Module, autocast: bool = True) -> None:
        """See `LowPrecision.wrap_forward`."""
        super().wrap_forward(model, autocast)
        forward = vars(model)["forward"]
        if not isinstance(forward, _EngineForward):
            in_evaluation = bool(self.recipe.use_autocast_during_eval)
            vars(model)["forward"] = _EngineForward.of(model, forward, self._enter, in_evaluation)


def _library() -> str:
    if not is_transformer_engine_available():
        raise ImportError("Transformer Engine is not installed: pip install transformer-engine[pytorch]")
    return "intel_transformer_engine" if is_hpu_available() else "transformer_engine"


def _engine() -> Any:
    name = _library()
    return import_module(name if name.startswith("intel") else f"{name}.pytorch")


def _refuse_without_support(device: torch.device) -> None:
    if _library().startswith("intel"):
        return
    try:
        supported, reason = import_module("transformer_engine.pytorch.fp8").check_fp8_support()
    except (AssertionError, OSError, RuntimeError) as error:  # without a GPU, or without its libraries
        supported, reason = False, str(error).partition("\n")[0]
    if not supported:
        raise PrecisionError(
            f"mixed_precision='fp8' with Transformer Engine is not supported by {device}: {reason}: use 'bf16', or "
            "torchao (ACCELERATE_FP8_BACKEND=AO)"
        )


def _recipe(settings: Any) -> Any:
    """Return Transformer Engine's recipe for ``settings``, a `TERecipeKwargs` or None."""
    recipes = import_module(f"{_library()}.{'recipe' if _library().startswith('intel') else 'common.recipe'}")
    chosen = settings.to_kwargs() if settings is not None else {}
    kwargs = {name: chosen[name] for name in TERecipeKwargs.__dataclass_fields__ if name in chosen}
    kwargs.pop("use_autocast_during_eval", None)
    if "fp8_format" in kwargs:
        kwargs["fp8_format"] = getattr(recipes.Format, kwargs["fp8_format"])
    if not kwargs.pop("use_mxfp8_block_scaling", False):
        if settings is not None:  # whose default is not the engine's
            kwargs["amax_compute_algo"] = settings.amax_compute_algo
        return recipes.DelayedScaling(**kwargs)
    supported, reason = import_module(f"{_library()}.pytorch.fp8").check_mxfp8_support()
    if not supported:
        raise PrecisionError(f"TERecipeKwargs(use_mxfp8_block_scaling=True) is not supported here: {reason}")
    delayed = next((name for name in ("amax_compute_algo", "amax_history_len") if name in kwargs), None)
    if delayed is not None:
        raise ArgumentError(f"TERecipeKwargs({delayed}=…) has no meaning with use_mxfp8_block_scaling: leave it out")
    return recipes.MXFP8BlockScaling(**kwargs)


# Accelerate's functions.


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear layers and layer norms of ``model`` by Transformer Engine's, in place, or those by torch's.

    Parameters stay the same objects. Linear layers with sizes that 16 does not divide stay.
    """
    engine = _engine()
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            new = _converted(engine, module, to_transformer_engine, _convert_linear, _convert_ln)
            if new is not None:
                for key, parameter in module.named_parameters(recurse=False):
                    setattr(new, key, parameter)
                setattr(parent, name, new)


def _converted(engine: Any, module: Any, to_engine: bool, linear: bool, norm: bool) -> nn.Module | None:
    linears, norms = (nn.Linear, nn.LayerNorm) if to_engine else (engine.Linear, engine.LayerNorm)
    if linear and isinstance(module, linears):
        sizes, bias, dtype = (module.in_features, module.out_features), module.bias is not None, module.weight.dtype
        if not to_engine:
            return nn.Linear(*sizes, bias=bias, dtype=dtype)
        # torch's own attention reads the weight of the second kind of layer, and does not call the layer.
        if isinstance(module, (engine.Linear, NonDynamicallyQuantizableLinear)) or any(size % 16 for size in sizes):
            return None
        return engine.Linear(*sizes, bias=bias, params_dtype=dtype)  # type: ignore[no-any-return]
    if norm and isinstance(module, norms):
        if not to_engine:
            return nn.LayerNorm(module.weight.shape, eps=module.eps, dtype=module.weight.dtype)
        # Its own norm is over one dimension, and has a weight and a bias.
        if isinstance(module, engine.LayerNorm) or module.bias is None or len(module.normalized_shape) > 1:
            return None
        return engine.LayerNorm(module.normalized_shape[0], eps=module.eps, params_dtype=module.weight.dtype)  # type: ignore[no-any-return]
    return None


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return True if ``model`` has layers of Transformer Engine."""
    engine = _engine()
    names = ("Linear", "LayerNorm", "TransformerLayer")
    kinds = tuple(getattr(engine, name) for name in names if hasattr(engine, name))
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a method that calls ``model_forward`` in 8 bits, in evaluation only with ``use_during_eval``."""
    enter = _engine().fp8_autocast

    @wraps(model_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with enter(enabled=use_during_eval or self.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Make ``model`` compute in 8 bits by ``fp8_recipe_handler``, a `TERecipeKwargs` or None; return it."""
    in_evaluation = bool(getattr(fp8_recipe_handler, "use_autocast_during_eval", False))
    forward = contextual_fp8_autocast(model.forward, _recipe(fp8_recipe_handler), in_evaluation)
    vars(model)["forward"] = MethodType(forward, model)
    return model
