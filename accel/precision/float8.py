"""8-bit training by torchao: the products of linear layers in float8, everything else as with bf16."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accel.enums import FP8BackendType
from accel.errors import ArgumentError, PrecisionError
from accel.fp8_recipes import AORecipeKwargs, import_float8
from accel.logging import get_logger
from accel.plugins import AutocastKwargs
from accel.precision.amp import LowPrecision
from accel.world.available import torchao_required

logger = get_logger(__name__)


class Float8(LowPrecision):
    """bf16 under autocast, with torchao's linear layers in models that are trained; weights stay in fp32."""

    fp8_backend = FP8BackendType.AO
    recipe: AORecipeKwargs

    def __init__(self, device: torch.device, recipe: AORecipeKwargs, autocast: AutocastKwargs | None = None) -> None:
        super().__init__(device, torch.bfloat16, autocast)
        self.recipe = recipe
        if device.type == "cpu":
            logger.warning_once("mixed_precision='fp8' on a CPU computes in software: to test a script, not to be fast")

    def convert(self, model: nn.Module, compiled: bool = False) -> None:
        """See `Precision.convert`. Parameters stay the same objects; a model that has such layers stays as it is."""
        name = type(model).__name__
        if any(hasattr(parameter, "placements") for parameter in model.parameters()):
            raise PrecisionError(
                f"mixed_precision='fp8': the {name} is split or sharded already, so its layers cannot be converted: "
                "leave that to prepare, or use 'bf16'"
            )
        if not has_ao_layers(model):
            config = replace(self.recipe.config, emulate=True) if self.device.type == "cpu" else self.recipe.config
            one_by_one = replace(config, enable_fsdp_float8_all_gather=False)  # it would replace the parameters
            convert_model_to_fp8_ao(model, one_by_one, self.recipe.module_filter_func)
            for layer in model.modules():
                if is_float8_layer(layer):
                    layer.config = config
        if not has_ao_layers(model):
            raise PrecisionError(
                f"mixed_precision='fp8': the {name} has no layer to convert: a linear one other than the first and "
                "the last, with sizes divisible by 16. Use 'bf16', or AORecipeKwargs(module_filter_func=…)"
            )
        if self.device.type == "cuda" and not compiled:
            logger.warning_once(
                "mixed_precision='fp8' is slower than 'bf16' without torch.compile: pass "
                "dynamo_plugin=TorchDynamoPlugin(backend='inductor') (--dynamo_backend inductor), unless the script "
                "compiles its model"
            )


def is_float8_layer(module: nn.Module) -> bool:
    """Return True for torchao's linear layer in 8 bits."""
    library = sys.modules.get("torchao.float8.float8_linear")
    return library is not None and isinstance(module, library.Float8Linear)


def refuse_8_bits(model: nn.Module, source: str) -> None:
    """Raise `ArgumentError` if ``model``, whose linear layers ``source`` splits, has layers in 8 bits."""
    if any(map(is_float8_layer, model.modules())):
        raise ArgumentError(
            f"{source}: layers in 8 bits (mixed_precision='fp8') cannot be split: leave out one of the two"
        )


def gather_in_8_bits(model: nn.Module, names: Iterable[list[str]]) -> None:
    """Make `fully_shard` gather the parameters called ``names`` in 8 bits, if their layer's configuration says so.

    Call it before. It replaces the parameters; those with several names stay.
    """
    for own_names in names:
        owner, _, key = own_names[0].rpartition(".")
        layer: Any = model.get_submodule(owner)
        if len(own_names) > 1 or key != "weight" or not is_float8_layer(layer):
            continue
        if layer.config.enable_fsdp_float8_all_gather:
            layer.weight = type(layer).from_float(layer, config=layer.config).weight


def without_cast(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that `gather_in_8_bits` has wrapped, which shares its memory; others as they are."""
    library = sys.modules.get("torchao.float8.fsdp_utils")
    is_wrapped = library is not None and isinstance(tensor, library.WeightWithDynamicFloat8CastTensor)
    return tensor._tensor if is_wrapped else tensor  # type: ignore[attr-defined]


# Accelerate's functions.


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of ``model``."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Collection[str | None]) -> bool:
    """Return True for a linear layer to convert: sizes that 16 divides, and a name not in ``layers_to_filter``."""
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else ()
    return bool(sizes) and not any(size % 16 for size in sizes) and fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return True for a linear layer to convert, in `convert_model_to_fp8_ao` but not the first and last of its model.

    Elsewhere only ``module`` itself is known, as in Accelerate: call `filter_linear_layers` with the names.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Return True if ``model`` has linear layers of torchao in 8 bits."""
    return any(map(is_float8_layer, model.modules()))


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[..., bool] | None = filter_first_and_last_linear_layers,
) -> None:
    """Replace the linear layers of ``model`` for which ``module_filter_func(module, name)`` is True, in place.

    ``config``: a `torchao.float8.Float8LinearConfig`.
    """
    if module_filter_func in (None, filter_first_and_last_linear_layers):
        module_filter_func = partial(filter_linear_layers, layers_to_filter=find_first_last_linear_layers(model))
    chosen = partial(_is_called_and, module_filter_func)
    if import_float8().convert_to_float8_training(model, module_filter_fn=chosen, config=config) is not model:
        raise PrecisionError("a model that is itself a linear layer cannot be converted to 8 bits in place")


def _is_called_and(chosen: Callable[..., bool], module: nn.Module, fqn: str) -> bool:
    # torch's own attention reads the weight of this kind of layer, and does not call the layer.
    return not isinstance(module, NonDynamicallyQuantizableLinear) and chosen(module, fqn)
