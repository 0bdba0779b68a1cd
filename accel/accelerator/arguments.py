"""Validation and defaults of `Accelerator`'s arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from accel.errors import ArgumentError, nearest
from accel.fp8_recipes import AORecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accel.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from accel.plugins.deepspeed import DeepSpeedPlugin, check_plugins
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.megatron import MegatronLMPlugin
from accel.plugins.parallelism import ParallelismConfig, TorchTensorParallelPlugin
from accel.state import AcceleratorState, GradientState, is_initialized
from accel.world.environment import read_flag, read_int

_HANDLERS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
_RECIPES = (AORecipeKwargs, TERecipeKwargs, MSAMPRecipeKwargs)
_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

# Arguments that Accelerate has removed, and their replacements.
_REMOVED = {
    "dispatch_batches": "dataloader_config=DataLoaderConfiguration(dispatch_batches=…)",
    "even_batches": "dataloader_config=DataLoaderConfiguration(even_batches=…)",
    "fp16": "mixed_precision='fp16'",
    "logging_dir": "project_dir=… or project_config=ProjectConfiguration(logging_dir=…)",
    "use_seedable_sampler": "dataloader_config=DataLoaderConfiguration(use_seedable_sampler=…)",
}


def refuse_unknown(arguments: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise `ArgumentError` for the first of ``arguments``, with its replacement or the nearest of ``known``."""
    for name in arguments:
        if name in _REMOVED:
            raise ArgumentError(f"Accelerator({name}=…) was removed: use {_REMOVED[name]}")
        raise ArgumentError(f"Accelerator({name}=…) is unknown{nearest(name, known)}")


def resolve_megatron(plugin: Any, **others: Any) -> MegatronLMPlugin | None:
    """Return the Megatron-LM plug-in: the argument, an earlier `Accelerator`'s or the environment's.

    Raises `ArgumentError` with another plug-in in ``others``, as this one sets how models are split.
    """
    if plugin is None and is_initialized():
        plugin = AcceleratorState().megatron_lm_plugin
    elif plugin is None and read_flag(os.environ, "ACCELERATE_USE_MEGATRON_LM"):
        plugin = MegatronLMPlugin()
    if plugin is None:
        return None
    if not isinstance(plugin, MegatronLMPlugin):
        raise ArgumentError(
            f"Accelerator(megatron_lm_plugin=…) must be a MegatronLMPlugin, not {type(plugin).__name__}"
        )
    for name, other in others.items():
        if other is not None:
            raise ArgumentError(f"megatron_lm_plugin and {name} contradict each other: keep one")
    return plugin


def resolve_deepspeed(plugin: Any, plugins: Any) -> DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None:
    """Return the DeepSpeed plug-in or plug-ins: the argument, an earlier `Accelerator`'s or the environment's."""
    if plugin is not None and plugins is not None:
        raise ArgumentError("pass Accelerator(deepspeed_plugin=…) or deepspeed_plugins, not both")
    chosen = plugins if plugin is None else plugin
    if chosen is not None:
        check_plugins(chosen)
    if chosen is None and is_initialized():
        return AcceleratorState().deepspeed_plugins
    if chosen is None and read_flag(os.environ, "ACCELERATE_USE_DEEPSPEED"):
        chosen = DeepSpeedPlugin()
    if chosen is not None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # transformers reads it when it loads a model
    return cast("DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None", chosen)


def resolve_fsdp(plugin: Any) -> FullyShardedDataParallelPlugin | None:
    """Return the FSDP plug-in: the argument, an earlier `Accelerator`'s or, if requested, one from ``FSDP_…``."""
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise ArgumentError(
            f"Accelerator(fsdp_plugin=…) must be a FullyShardedDataParallelPlugin, not {type(plugin).__name__}"
        )
    if isinstance(plugin, FullyShardedDataParallelPlugin):
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # transformers reads it when it loads a model
        return plugin
    if is_initialized() and AcceleratorState().fsdp_plugin is not None:
        return AcceleratorState().fsdp_plugin
    return FullyShardedDataParallelPlugin() if read_flag(os.environ, "ACCELERATE_USE_FSDP") else None


def resolve_parallelism(
    config: ParallelismConfig | None, plugin: TorchTensorParallelPlugin | None = None
) -> ParallelismConfig | None:
    """Return the parallelism configuration, from the arguments or ``PARALLELISM_CONFIG_…``."""
    if plugin is not None:
        if not isinstance(plugin, TorchTensorParallelPlugin):
            raise ArgumentError(
                f"Accelerator(torch_tp_plugin=…) must be a TorchTensorParallelPlugin, not {type(plugin).__name__}"
            )
        if config is not None:
            raise ArgumentError("pass parallelism_config=ParallelismConfig(tp_size=…) or torch_tp_plugin, not both")
        return ParallelismConfig(tp_size=plugin.tp_size)
    if config is not None and not isinstance(config, ParallelismConfig):
        raise ArgumentError(
            f"Accelerator(parallelism_config=…) must be a ParallelismConfig, not {type(config).__name__}"
        )
    if config is None and read_flag(os.environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    return config


def handlers_by_class(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return handlers by class. Raises `ArgumentError` for an unknown class and for a class given twice."""
    by_class: dict[type, Any] = {}
    for handler in handlers:
        kinds = (*_HANDLERS, *_RECIPES)
        kind = next((handler_class for handler_class in kinds if isinstance(handler, handler_class)), None)
        names = ", ".join(handler_class.__name__ for handler_class in kinds)
        if kind is None:
            raise ArgumentError(f"kwargs_handlers: {type(handler).__name__} is not one of {names}")
        if kind in by_class:
            raise ArgumentError(f"kwargs_handlers: {kind.__name__} is given twice")
        by_class[kind] = handler
    recipes = [kind.__name__ for kind in by_class if kind in _RECIPES]
    if len(recipes) > 1:
        raise ArgumentError(f"kwargs_handlers: {' and '.join(recipes)} are two ways to compute in 8 bits: pass one")
    return by_class


def recipe_of(handlers: Mapping[type, Any]) -> Any:
    """Return the settings of 8 bits among ``handlers``, or None."""
    return next((handlers[kind] for kind in _RECIPES if kind in handlers), None)


def resolve_loading(config: DataLoaderConfiguration | None, split_batches: bool | None) -> DataLoaderConfiguration:
    """Return the loader configuration, with ``split_batches`` if that was passed separately."""
    config = config or DataLoaderConfiguration()
    return config if split_batches is None else replace(config, split_batches=split_batches)


def resolve_project(
    config: ProjectConfiguration | None, directory: str | os.PathLike[str] | None
) -> ProjectConfiguration:
    """Return the project configuration, with ``directory`` unless it has a directory already."""
    config = config or ProjectConfiguration()
    if directory is not None and config.project_dir is None:
        config.set_directories(os.fspath(directory))
    return config


def resolve_accumulation(
    plugin: GradientAccumulationPlugin | None,
    steps: int,
    engines: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None,
) -> GradientAccumulationPlugin:
    """Return the accumulation plug-in: the arguments', DeepSpeed's, an earlier `Accelerator`'s, or the environment's.

    The variable is ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``.
    """
    if plugin is not None and steps != 1:
        raise ArgumentError("pass gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    engine = next(iter(engines.values())) if isinstance(engines, dict) else engines
    engine_steps = None if engine is None else engine.gradient_accumulation_steps
    own_steps = steps if plugin is None else plugin.num_steps
    if isinstance(engine_steps, int):
        if own_steps not in (1, engine_steps):
            raise ArgumentError(
                f"gradient_accumulation_steps is {own_steps} in the script, but {engine_steps} in the DeepSpeedPlugin "
                "or its configuration: remove one of the two, or set 'auto' there"
            )
        return replace(plugin or GradientAccumulationPlugin(), num_steps=engine_steps)
    if plugin is not None:
        return plugin
    if steps == 1 and is_initialized() and GradientState().plugin_kwargs:
        return GradientState().plugin
    auto = os.environ.get(_STEPS, "").lower() == "auto"  # DeepSpeed's value for "as in the script"
    from_env = read_int(os.environ, _STEPS, minimum=1) if steps == 1 and not auto else None
    return GradientAccumulationPlugin(num_steps=from_env or steps)
