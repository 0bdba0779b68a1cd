"""Models with quantised linear layers, in 8 or 4 bits, by bitsandbytes."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn

from accel.big_models.device_map import device_of
from accel.big_models.devices import META, Device, accelerator_type, is_offload
from accel.big_models.dispatch import dispatch_model, infer_map
from accel.big_models.load import load_checkpoint_in_model
from accel.big_models.max_memory import MaxMemory
from accel.big_models.module_tensors import find_tied_parameters, like_parameter
from accel.errors import ArgumentError
from accel.plugins.bnb import BnbQuantizationConfig
from accel.world.available import is_4bit_bnb_available, is_8bit_bnb_available

logger = logging.getLogger(__name__)


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: MaxMemory | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Quantise the linear layers of ``model`` with bitsandbytes, and return the model.

    The weights of a model on the meta device are read from ``weights_location`` (see `load_checkpoint_in_model`),
    quantised or not, and dispatched over the devices of ``device_map`` (see `get_quantized_model_device_map`). A
    model with values is quantised on the accelerator, or on the host without one; ``weights_location`` is not read.

    Modules of a 4-bit model that are offloaded are not quantised. ``offload_state_dict`` has no effect, as a file
    is never in memory as a whole.

    Raises `ArgumentError` without bitsandbytes, for an empty model without ``weights_location``, and what
    `load_checkpoint_in_model` raises.
    """
    config = _resolve(bnb_quantization_config, model, device_map)
    is_empty = get_parameter_device(model) == META
    if is_empty and weights_location is None:
        raise ArgumentError(f"{type(model).__name__} is on the meta device and has no values: pass weights_location")
    model = replace_with_bnb_layers(model, config, _kept(config))
    loaded: Any = model  # with the marks that peft looks for
    loaded.is_loaded_in_4bit, loaded.is_loaded_in_8bit = config.load_in_4bit, config.load_in_8bit
    if not is_empty:
        if weights_location is not None:
            logger.warning("weights_location is not read: %s has its values already", type(model).__name__)
        _cast(model, config)
        return model.to(_main_device())
    device_map = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    load_checkpoint_in_model(
        model,
        weights_location or "",
        device_map=device_map,
        dtype=config.torch_dtype,
        offload_folder=offload_folder,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
    )
    return dispatch_model(model, device_map=device_map, offload_dir=offload_folder)


def _resolve(
    config: BnbQuantizationConfig, model: nn.Module, device_map: str | Mapping[str, Device] | None
) -> BnbQuantizationConfig:
    """Return a copy of ``config`` with the names of all modules that are not quantised."""
    available = is_4bit_bnb_available() if config.load_in_4bit else is_8bit_bnb_available()
    if not available:
        raise ArgumentError("load_and_quantize_model: bitsandbytes is not installed: pip install 'accel-launch[bnb]'")
    resolved = copy.copy(config)
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    offloaded = _offloaded(device_map) if config.load_in_4bit and isinstance(device_map, Mapping) else []
    resolved.skip_modules = [*skipped, *offloaded]
    resolved.keep_in_fp32_modules = list(config.keep_in_fp32_modules or ())
    return resolved


def _kept(config: BnbQuantizationConfig) -> list[str]:
    return [*(config.skip_modules or ()), *(config.keep_in_fp32_modules or ())]


def _main_device() -> Device:
    return "cpu" if accelerator_type() is None else torch.accelerator.current_device_index()


def _offloaded(device_map: Mapping[str, Device]) -> list[str]:
    """Return the modules that are moved for their forward: without an accelerator, those on the host are not."""
    computes = any(not is_offload(device) for device in device_map.values())
    return [name for name, device in device_map.items() if device == "disk" or (computes and is_offload(device))]


def _cast(model: nn.Module, config: BnbQuantizationConfig) -> None:
    """Cast the floating-point parameters to their types; a tied one to float32 if any of its names is kept so."""
    named = list(model.named_parameters(remove_duplicate=False))
    for in_fp32 in (False, True):
        for name, param in named:
            if param.is_floating_point() and _matches(name, config.keep_in_fp32_modules or ()) == in_fp32:
                param.data = param.data.to(torch.float32 if in_fp32 else config.torch_dtype)


def _matches(name: str, keys: Collection[str]) -> bool:
    """Return True if one of ``keys`` is ``name``, or modules in its path."""
    return any(f".{key}." in f".{name}." for key in keys)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: list[str] | None = None,
) -> dict[str, Device]:
    """Return the device map of a model with quantised layers.

    Without ``device_map`` the model is put on the accelerator, or on the host without one. For the names of
    strategies see `load_checkpoint_and_dispatch`. Raises `ArgumentError` for a 4-bit layer that is offloaded.
    """
    config = bnb_quantization_config
    if device_map is None:
        return {"": _main_device()}
    if isinstance(device_map, str):
        types = {name: config.torch_dtype for name, _ in model.named_parameters() if _matches(name, _kept(config))}
        in_fp32 = config.keep_in_fp32_modules or ()
        types |= {name: torch.float32 for name, _ in model.named_parameters() if _matches(name, in_fp32)}
        device_map = infer_map(
            device_map, model, max_memory, no_split_module_classes, config.target_dtype, special_dtypes=types
        )
    offloaded = {name: device_map[name] for name in _offloaded(device_map)}
    if config.load_in_4bit:
        for name, layer in model.named_modules():
            if _is_4bit(layer) and device_of(f"{name}.weight", offloaded) is not None:
                raise ArgumentError(
                    f"{name} would be offloaded, and layers in 4 bits cannot be: use load_in_8bit=True, a larger "
                    "max_memory, or a device_map that names the modules to offload, which are then not quantised"
                )
    return dict(device_map)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Collection[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Replace each `torch.nn.Linear` in ``model`` by a layer of bitsandbytes with its weights; return ``model``.

    ``modules_to_not_convert``: names of modules, or paths, that stay as they are. ``current_key_name``: the path
    of ``model`` in a larger one. The weights are quantised when they are moved to a device.
    """
    prefix = "".join(f"{name}." for name in current_key_name or ())
    linear = [(path, module) for path, module in model.named_modules() if path and type(module) is nn.Linear]
    replaced = False
    for path, module in linear:
        if not _matches(prefix + path, modules_to_not_convert or ()):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _bnb_layer(module, bnb_quantization_config))
            replaced = True
    if not replaced:
        logger.warning("%s has no torch.nn.Linear to quantise: its weights stay as they are", type(model).__name__)
    return model


def _bnb_layer(linear: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    bnb = import_module("bitsandbytes")
    shape: tuple[Any, ...] = (linear.in_features, linear.out_features, linear.bias is not None)
    layer: nn.Module
    if config.load_in_8bit:
        layer = bnb.nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=config.llm_int8_threshold, device=META)
    else:
        layer = bnb.nn.Linear4bit(
            *shape,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
            device=META,
        )
    for name, param in linear.named_parameters():
        setattr(layer, name, like_parameter(getattr(layer, name), param.detach()))
    layer.training = linear.training
    return layer.requires_grad_(False)


def _is_4bit(layer: nn.Module) -> bool:
    return any(kind.__name__ == "Linear4bit" for kind in type(layer).__mro__)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that are better not quantised: those with tied weights, and the last one (a model's head).

    A base model of transformers (`base_model_prefix`), which has no head, has none of the latter unless weights
    are tied.
    """
    tied = [name for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", None)
    if not tied and prefix is not None and not hasattr(model, prefix):
        return []
    last = [name for name, _ in model.named_children()][-1:]
    return list(dict.fromkeys([*(name.removesuffix(".weight").removesuffix(".bias") for name in tied), *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return True if ``model`` has 4-bit layers of bitsandbytes."""
    return any(map(_is_4bit, model.modules()))


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of the first parameter of the module ``parameter``; the host for one without parameters."""
    return next((param.device for param in parameter.parameters()), torch.device("cpu"))
