"""megatron-core: its import, its groups of processes, and its settings made from `MegatronLMPlugin`'s."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch

from accel import collectives
from accel.errors import ArgumentError, nearest
from accel.plugins.megatron import MegatronLMPlugin
from accel.state import AcceleratorState
from accel.world.process_group import form_alone
from accel.world.versions import compare_versions

DEVICE_TYPES = {"cuda"}  # those that megatron-core computes on
_OLDEST = "0.16.0"
_INSTALL = "pip install 'accel-launch[megatron]'"
_DIMENSIONS = {  # the plug-in's name of each size → megatron-core's name of the dimension
    "tp_degree": "tensor_model_parallel",
    "pp_degree": "pipeline_model_parallel",
    "context_parallel_size": "context_parallel",
    "expert_model_parallel_size": "expert_model_parallel",
}


def core_of(name: str) -> Any:
    """Return the module ``name`` of megatron-core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Transformer Engine and Apex are not installed
        return import_module(f"megatron.core.{name}")


def is_initialised() -> bool:
    """Return True if megatron-core's groups of processes exist."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    return parallel_state is not None and bool(parallel_state.model_parallel_is_initialized())


def group_sizes() -> dict[str, int]:
    """Return the size of megatron-core's groups of processes, by dimension."""
    groups = core_of("parallel_state")
    return {dimension: getattr(groups, f"get_{dimension}_world_size")() for dimension in _DIMENSIONS.values()}


def initialise(state: AcceleratorState, plugin: MegatronLMPlugin) -> Any:
    """Form megatron-core's groups of processes, or check those that exist; return its ``parallel_state``.

    Raises `ArgumentError`, before any collective call, for a device that it does not compute on, without the package,
    and for sizes that do not make up the world.
    """
    if state.device.type not in DEVICE_TYPES:
        raise ArgumentError(
            f"megatron-core computes on CUDA only, but this process uses {state.device}: start it on GPUs, or train a "
            "model of transformers, whose layers MegatronLMPlugin splits on CPUs too"
        )
    try:
        parallel_state = core_of("parallel_state")
    except ModuleNotFoundError as error:
        missing = "megatron-core" if (error.name or "").startswith("megatron") else error.name
        raise ArgumentError(f"megatron_lm_plugin: {missing} is not installed: {_INSTALL}") from error
    if compare_versions("megatron-core", "<", _OLDEST):
        raise ArgumentError(f"megatron_lm_plugin: megatron-core is older than {_OLDEST}: {_INSTALL} --upgrade")
    _check_sizes(plugin, state.num_processes)
    if is_initialised():
        for name, size in zip(_DIMENSIONS, group_sizes().values(), strict=True):
            if size != getattr(plugin, name):
                raise ArgumentError(
                    f"MegatronLMPlugin({name}={getattr(plugin, name)}), but megatron-core's parallel_state has {size}: "
                    "set the same size in both"
                )
        return parallel_state
    form_alone(state.device)
    parallel_state.initialize_model_parallel(
        **{f"{dimension}_size": getattr(plugin, name) for name, dimension in _DIMENSIONS.items()},
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
    )
    return parallel_state


def _check_sizes(plugin: MegatronLMPlugin, processes: int) -> None:
    for names in (
        ("tp_degree", "pp_degree", "context_parallel_size"),
        ("expert_tensor_parallel_size", "expert_model_parallel_size", "pp_degree"),
    ):
        size = 1
        for name in names:
            size *= getattr(plugin, name)
        if processes % size:
            factors = " × ".join(f"{name} ({getattr(plugin, name)})" for name in names)
            raise ArgumentError(
                f"MegatronLMPlugin: number of processes ({processes}) is not divisible by {factors} = {size}"
            )


def seed() -> None:
    """Seed megatron-core's generators with the main process's seed, unless the script has seeded them."""
    random = core_of("tensor_parallel.random")
    if not random.get_cuda_rng_tracker().is_initialized():
        (value,) = collectives.broadcast_object_list([torch.initial_seed() % 2**31])
        random.model_parallel_cuda_manual_seed(value)


def check_config(config: Any, plugin: MegatronLMPlugin, precision: str) -> None:
    """Raise `ArgumentError` if a model's ``TransformerConfig`` contradicts the plug-in or the precision."""
    if precision == "fp8":
        raise ArgumentError(
            "mixed_precision='fp8': a model of megatron-core computes in 8 bits by its own configuration: use 'bf16' "
            "and TransformerConfig(fp8='hybrid', bf16=True)"
        )
    for name, dimension in _DIMENSIONS.items():
        size = getattr(config, f"{dimension}_size")
        if size != getattr(plugin, name):
            raise ArgumentError(
                f"MegatronLMPlugin({name}={getattr(plugin, name)}), but the model's TransformerConfig has "
                f"{dimension}_size={size}: set the same size in both"
            )
    experts = getattr(config, "num_moe_experts", None)
    if experts and config.expert_tensor_parallel_size != plugin.expert_tensor_parallel_size:
        raise ArgumentError(
            f"MegatronLMPlugin(expert_tensor_parallel_size={plugin.expert_tensor_parallel_size}), but the model's "
            f"TransformerConfig has {config.expert_tensor_parallel_size}: set the same size in both"
        )
    for name in ("fp16", "bf16"):
        if bool(getattr(config, name)) != (precision == name):
            raise ArgumentError(
                f"mixed_precision is {precision!r}, but the model's TransformerConfig has "
                f"{name}={getattr(config, name)}: set both to the same precision"
            )


def optimizer_settings(
    plugin: MegatronLMPlugin, optimizer: torch.optim.Optimizer, precision: str
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the fields of ``OptimizerConfig`` and ``DistributedDataParallelConfig``, and if all weights decay.

    Raises `ArgumentError` for an optimizer that megatron-core does not have.
    """
    groups = optimizer.param_groups
    rates = {group["lr"] for group in groups}
    decays = {group["weight_decay"] for group in groups}
    if len(rates) > 1 or len(decays - {0}) > 1:
        raise ArgumentError(
            "prepare: megatron-core's optimizer has one learning rate and one weight decay, but the groups of this "
            f"one have {sorted(rates)} and {sorted(decays)}: pass one of each (weight decay 0 is allowed too)"
        )
    settings = {
        **_kind_settings(optimizer),
        "lr": float(rates.pop()),
        "min_lr": plugin.min_lr,
        "weight_decay": max(decays),
        "clip_grad": plugin.gradient_clipping,
        "fp16": precision == "fp16",
        "bf16": precision == "bf16",
        "params_dtype": {"fp16": torch.half, "bf16": torch.bfloat16}.get(precision, torch.float),
        "use_distributed_optimizer": plugin.use_distributed_optimizer,
        "use_precision_aware_optimizer": plugin.use_precision_aware_optimizer,
        "optimizer_cpu_offload": plugin.optimizer_cpu_offload,
        "overlap_cpu_optimizer_d2h_h2d": plugin.overlap_cpu_optimizer_d2h_h2d,
    }
    if plugin.optimizer_cpu_offload:
        settings["optimizer_offload_fraction"] = 1.0
    wrapper = {"use_distributed_optimizer": plugin.use_distributed_optimizer, "grad_reduce_in_fp32": True}
    _add_others(plugin.other_megatron_args or {}, settings, wrapper)
    return settings, wrapper, len(decays) == 1


def _kind_settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    group = optimizer.param_groups[0]
    unsupported = [name for name in ("amsgrad", "maximize", "nesterov", "dampening") if group.get(name)]
    kind = type(optimizer)
    if unsupported or not issubclass(kind, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)):
        what = f"{kind.__name__}({', '.join(f'{name}={group[name]}' for name in unsupported)})"
        raise ArgumentError(f"prepare: megatron-core has no {what}: pass torch.optim.AdamW, Adam or SGD without these")
    if issubclass(kind, torch.optim.SGD):
        return {"optimizer": "sgd", "sgd_momentum": group["momentum"]}
    beta1, beta2 = group["betas"]
    return {
        "optimizer": "adam",
        "adam_beta1": float(beta1),
        "adam_beta2": float(beta2),
        "adam_eps": group["eps"],
        "decoupled_weight_decay": issubclass(kind, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay")),
    }


def _add_others(others: Mapping[str, Any], *settings: dict[str, Any]) -> None:
    """Add each of ``other_megatron_args`` to the settings that have a field of its name."""
    kinds = (core_of("optimizer").OptimizerConfig, core_of("distributed").DistributedDataParallelConfig)
    names: Sequence[set[str]] = [{field.name for field in fields(kind)} for kind in kinds]
    for name, value in others.items():
        if not any(name in known for known in names):
            raise ArgumentError(
                f"MegatronLMPlugin(other_megatron_args={{{name!r}: …}}) is no field of OptimizerConfig or "
                f"DistributedDataParallelConfig{nearest(name, set().union(*names))}; settings of the model belong into "
                "its TransformerConfig"
            )
        for known, chosen in zip(names, settings, strict=True):
            if name in known:
                chosen[name] = value


def schedule_settings(
    plugin: MegatronLMPlugin, placeholder: Any, settings: Mapping[str, Any], steps_at_once: int
) -> dict[str, Any]:
    """Return the arguments of ``OptimizerParamScheduler``; every step of the optimizer advances ``steps_at_once``.

    Raises `ArgumentError` without a number of steps, and for a warm-up that is not shorter.
    """
    iterations = plugin.lr_decay_iters or plugin.train_iters
    total = iterations * steps_at_once if iterations else placeholder.total_num_steps
    if not total:
        raise ArgumentError("MegatronLMDummyScheduler needs total_num_steps, or MegatronLMPlugin(train_iters=…)")
    if plugin.lr_warmup_fraction:
        warmup = int(plugin.lr_warmup_fraction * total)
    else:
        warmup = plugin.lr_warmup_iters * steps_at_once if plugin.lr_warmup_iters else placeholder.warmup_num_steps
    if warmup >= total:
        raise ArgumentError(f"MegatronLMDummyScheduler: {warmup} steps of warm-up are not fewer than all {total}")
    decay = settings["weight_decay"]
    return {
        "init_lr": 0.0,
        "max_lr": settings["lr"],
        "min_lr": plugin.min_lr,
        "lr_warmup_steps": warmup,
        "lr_decay_steps": total,
        "lr_decay_style": plugin.lr_decay_style,
        "start_wd": decay if plugin.start_weight_decay is None else plugin.start_weight_decay,
        "end_wd": decay if plugin.end_weight_decay is None else plugin.end_weight_decay,
        "wd_incr_steps": total,
        "wd_incr_style": plugin.weight_decay_incr_style,
    }


class Schedule:
    """megatron-core's schedule of learning rate and weight decay, with the methods of torch's schedulers."""

    def __init__(self, optimizer: Any, settings: dict[str, Any]) -> None:
        self.optimizer = optimizer
        self._inner = core_of("optimizer_param_scheduler").OptimizerParamScheduler(optimizer, **settings)

    def step(self) -> None:
        """Advance by one step."""
        self._inner.step(1)

    def get_last_lr(self) -> list[float]:
        """Return the current learning rates, by parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule, and its settings."""
        state: dict[str, Any] = self._inner.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position. Raises an error if the schedule has other settings."""
        self._inner.num_steps = 0
        self._inner.load_state_dict(state_dict)
