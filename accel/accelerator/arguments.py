"""Validation and defaults of `Accelerator`'s arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accel.errors import ArgumentError, nearest
from accel.plugins import (
    RECIPES,
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
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from accel.world.environment import read_flag, read_int

_HANDLERS = (AutocastKwargs, DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs, ProfileKwargs)
_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_UNSUPPORTED_BACKENDS = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")

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


def refuse_environment(env: Mapping[str, str]) -> None:
    """Raise `ArgumentError` if a variable selects a training method that this version does not have.

    Ignoring it would silently train in another way than requested.
    """
    names = [name for name in _UNSUPPORTED_BACKENDS if read_flag(env, name)]
    if names:
        raise ArgumentError(f"environment variable {names[0]}={env[names[0]]}: not in this version of accel; unset it")


def resolve_fsdp(plugin: Any) -> FullyShardedDataParallelPlugin | None:
    """Return the FSDP plug-in: the argument or, if ``ACCELERATE_USE_FSDP`` is set, one from ``FSDP_…``."""
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise ArgumentError(
            f"Accelerator(fsdp_plugin=…) must be a FullyShardedDataParallelPlugin, not {type(plugin).__name__}"
        )
    if isinstance(plugin, FullyShardedDataParallelPlugin):
        os.environ["ACCELERATE_USE_FSDP"] = "true"  # transformers reads it when it loads a model
        return plugin
    return FullyShardedDataParallelPlugin() if read_flag(os.environ, "ACCELERATE_USE_FSDP") else None


def resolve_parallelism(
    config: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin | None
) -> ParallelismConfig | None:
    """Return the parallelism configuration, from the argument or ``PARALLELISM_CONFIG_…``.

    Raises `ArgumentError` if it shards models but there is no FSDP plug-in.
    """
    if config is not None and not isinstance(config, ParallelismConfig):
        raise ArgumentError(
            f"Accelerator(parallelism_config=…) must be a ParallelismConfig, not {type(config).__name__}"
        )
    if config is None and read_flag(os.environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    if config is not None and config.dp_shard_enabled and plugin is None:
        raise ArgumentError(
            f"ParallelismConfig(dp_shard_size={config.dp_shard_size}) shards models: "
            "pass fsdp_plugin=FullyShardedDataParallelPlugin() too (--use_fsdp)"
        )
    return config


def handlers_by_class(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return handlers by class. Raises `ArgumentError` for an unknown class and for a class given twice."""
    by_class: dict[type, Any] = {}
    for handler in handlers:
        kind = next((handler_class for handler_class in _HANDLERS if isinstance(handler, handler_class)), None)
        names = ", ".join(handler_class.__name__ for handler_class in _HANDLERS)
        if kind is None and type(handler).__name__ in RECIPES:
            raise ArgumentError(
                f"kwargs_handlers: {type(handler).__name__} is for mixed_precision='fp8', "
                "which is not in this version of accel: leave it out"
            )
        if kind is None:
            raise ArgumentError(f"kwargs_handlers: {type(handler).__name__} is none of {names}")
        if kind in by_class:
            raise ArgumentError(f"kwargs_handlers: {kind.__name__} is given twice")
        by_class[kind] = handler
    return by_class


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


def resolve_accumulation(plugin: GradientAccumulationPlugin | None, steps: int) -> GradientAccumulationPlugin:
    """Return the accumulation plug-in, from the arguments or ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``."""
    if plugin is None:
        auto = os.environ.get(_STEPS, "").lower() == "auto"  # DeepSpeed's value for "as in the script"
        from_env = read_int(os.environ, _STEPS, minimum=1) if steps == 1 and not auto else None
        return GradientAccumulationPlugin(num_steps=from_env or steps)
    if steps != 1:
        raise ArgumentError("pass gradient_accumulation_steps or gradient_accumulation_plugin, not both")
    return plugin
