"""Preparation of an engine of DeepSpeed: the values of its configuration, placeholders, and optimizers on the CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accel.errors import ArgumentError
from accel.parallel.base import Loading
from accel.parallel.deepspeed_ops import load_extension
from accel.parallel.mesh import resolve_open_dimension
from accel.plugins.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel.plugins.parallelism import ParallelismConfig
from accel.state import GradientState


def resolve_sizes(config: ParallelismConfig | None, plugins: Sequence[DeepSpeedPlugin], world: int) -> tuple[int, int]:
    """Return the number of processes that split a sequence, and of those that split layers.

    Sets the open size in ``config``, and the number for layers in the configurations of ``plugins``. Raises
    `ArgumentError` for sizes that DeepSpeed does not have.
    """
    key = "tensor_parallel.autotp_size"
    layers = 1 if config is None else config.tp_size
    for plugin in plugins:
        source, own = plugin.hf_ds_config.source, plugin.get_value(key) or 1
        if not isinstance(own, int) or own < 1:
            raise ArgumentError(f"{key} is {own!r} in {source}: it must be a number of processes")
        if own > 1 and layers > 1 and own != layers:
            raise ArgumentError(f"tp_size is {layers}, but {key} is {own} in {source}: remove one of the two")
        layers = max(layers, own)
    sequences = 1
    if config is not None:
        if config.cp_enabled:
            raise ArgumentError(f"ParallelismConfig(cp_size={config.cp_size}) and deepspeed_plugin: use sp_size")
        config.tp_size, sequences = layers, config.sp_size
        if layers > 1 and sequences > 1:
            raise ArgumentError(
                f"DeepSpeed: tp_size={layers} and sp_size={sequences}: an engine splits layers or sequences, not both"
            )
        resolve_open_dimension(config, world, "dp_shard")
        config.check(world)
    if world % layers:
        raise ArgumentError(f"number of processes ({world}) is not divisible by {key} ({layers})")
    if layers > 1:
        for plugin in plugins:
            if plugin.hf_ds_config.is_zero3():
                raise ArgumentError(f"DeepSpeed: tp_size={layers} is for stages 0 to 2: set zero_stage=2 or tp_size=1")
            plugin.hf_ds_config.set_value(key, layers)
    return sequences, layers


def refuse_alone(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
    """Raise `ArgumentError` for an optimizer or a placeholder that comes without a model."""
    alone = [*optimizers, *(item for item in schedulers if isinstance(item, DummyScheduler))]
    if alone:
        raise ArgumentError(
            f"prepare: under DeepSpeed a {type(alone[0]).__name__} and its model must come in one call of prepare()"
        )


def own_scheduler(schedulers: Sequence[Any]) -> Any:
    """Return the scheduler that the engine is to step: a placeholder, or one of DeepSpeed's classes."""
    own = [
        item
        for item in schedulers
        if isinstance(item, DummyScheduler) or type(item).__module__ == "deepspeed.runtime.lr_schedules"
    ]
    if len(own) > 1:
        raise ArgumentError("prepare: an engine of DeepSpeed steps one scheduler")
    return own[0] if own else None


def check_placeholders(plugin: DeepSpeedPlugin, optimizer: Any, schedulers: Sequence[Any]) -> None:
    """Raise `ArgumentError` if a part is both in the configuration and in the script, or in neither."""
    config, source = plugin.deepspeed_config, plugin.hf_ds_config.source
    in_script = optimizer is not None and not isinstance(optimizer, DummyOptim)
    if in_script and "optimizer" in config:
        raise ArgumentError(f"prepare: an optimizer is in {source} and in the script: remove one, or pass a DummyOptim")
    if isinstance(optimizer, DummyOptim) and "optimizer" not in config:
        raise ArgumentError(f"prepare: a DummyOptim stands for the optimizer in {source}, which has none: add it")
    for scheduler in schedulers:
        is_placeholder = isinstance(scheduler, DummyScheduler)
        in_script = not is_placeholder or scheduler.lr_scheduler_callable is not None
        if in_script and "scheduler" in config:
            raise ArgumentError(f"prepare: a scheduler is in {source} and in the script: remove one")
        if not in_script and "scheduler" not in config:
            raise ArgumentError(
                f"prepare: a DummyScheduler stands for the scheduler in {source}, which has none: add it, or pass "
                "lr_scheduler_callable"
            )
        if not is_placeholder and "optimizer" in config:
            raise ArgumentError(
                f"prepare: the {type(scheduler).__name__} steps an optimizer of the script, but the optimizer is in "
                f"{source}: pass DummyScheduler(optimizer, lr_scheduler_callable=…)"
            )


def fill(
    plugin: DeepSpeedPlugin,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    loading: Loading,
    *,
    world: int,
    copies: int,
) -> None:
    """Replace every ``"auto"`` in the configuration of ``plugin``.

    ``world``: the processes, or groups of ``copies`` processes, that train on different batches at a time.
    """
    window = GradientState().num_steps
    config = plugin.deepspeed_config
    sizes = loading.batch_sizes
    batch = (min if plugin.is_train_batch_min else max)(sizes) if sizes else None
    if not plugin.is_filled("train_micro_batch_size_per_gpu"):
        batch = config.get("train_micro_batch_size_per_gpu", batch)
    values: dict[str, Any] = {
        "gradient_accumulation_steps": window,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": batch,
        "train_batch_size": None if batch is None else batch * window * world,
        **_bucket_sizes(model),
    }
    if isinstance(optimizer, DummyOptim):
        own = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
        values |= {f"optimizer.params.{name}": value for name, value in own.items()}
    if isinstance(scheduler, DummyScheduler):
        values |= _schedule(scheduler, 1 if loading.split_batches else world)
    plugin.fill(values)
    _check_batch(config, window, world, copies)


def _bucket_sizes(model: nn.Module) -> dict[str, int]:
    """Return the sizes that DeepSpeed's documentation derives from the hidden size; nothing if that is not known."""
    config = getattr(model, "config", None)
    for part in (config, getattr(config, "text_config", None)):
        size = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        if size:
            return {
                "zero_optimization.reduce_bucket_size": size * size,
                "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * size * size),
                "zero_optimization.stage3_param_persistence_threshold": 10 * size,
            }
    return {}


def _schedule(scheduler: DummyScheduler, shares: int) -> dict[str, Any]:
    total = scheduler.total_num_steps
    return {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": _rates(scheduler.optimizer),
        "scheduler.params.warmup_num_steps": max(1, scheduler.warmup_num_steps),  # DeepSpeed refuses 0
        "scheduler.params.total_num_steps": None if total is None else math.ceil(total / shares),
        **{f"scheduler.params.{name}": value for name, value in scheduler.kwargs.items()},
    }


def _rates(optimizer: Any) -> Any:
    """Return the learning rate of ``optimizer``, or a list of its groups' rates if they differ."""
    if isinstance(optimizer, DummyOptim):
        groups = [group if isinstance(group, Mapping) else {} for group in optimizer.params]
        rates = [group.get("lr", optimizer.lr) for group in groups]
    else:
        rates = [group["lr"] for group in getattr(optimizer, "param_groups", ())]
    return rates if len(set(rates)) > 1 else next(iter(rates), None)


def _check_batch(config: dict[str, Any], window: int, world: int, copies: int) -> None:
    total, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if total is None:
        return
    product = window * world * (micro or 1)
    if micro and total == product * copies:  # Trainer counts each process
        config["train_batch_size"] = total = product
    if total != product if micro else total % product:
        parts = f"{micro} rows × {window} steps × {world} processes" if micro else f"{window} steps × {world} processes"
        raise ArgumentError(f"DeepSpeed: train_batch_size is {total}, which does not fit {parts}: set it to 'auto'")


def for_engine(optimizer: Any, config: dict[str, Any]) -> Any:
    """Return the optimizer that the engine takes: if its state is offloaded, DeepSpeed's for the CPU where it has one.

    Raises `ArgumentError` for torch's Adagrad with several groups at stages 1 and 2, where DeepSpeed loses groups.
    """
    if _offloads(config) and config.get("zero_force_ds_cpu_optimizer", True):
        config["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed would take its Adam only
        if has_cpu_optimizer(optimizer):
            return map_pytorch_optim_to_deepspeed(optimizer)
    stage = config["zero_optimization"]["stage"]
    if isinstance(optimizer, torch.optim.Adagrad) and len(optimizer.param_groups) > 1 and stage in (1, 2):
        raise ArgumentError(
            f"DeepSpeed: Adagrad at stage {stage} must have one group of parameters, not "
            f"{len(optimizer.param_groups)}: set zero_stage to 0 or 3, or take another optimizer"
        )
    return optimizer


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer) -> Any:
    """Return DeepSpeed's optimizer for the CPU with the groups of ``optimizer``: an Adam, AdamW or Adagrad of torch.

    Raises `ArgumentError` for another optimizer.
    """
    if not has_cpu_optimizer(optimizer):
        raise ArgumentError(f"DeepSpeed has no optimizer for the CPU in place of {type(optimizer).__name__}")
    defaults = {name: optimizer.defaults[name] for name in ("lr", "weight_decay", "eps")}
    if isinstance(optimizer, torch.optim.Adagrad):
        from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

        load_extension("cpu_adagrad", "CPUAdagradBuilder")
        return DeepSpeedCPUAdagrad(optimizer.param_groups, **defaults)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adamw = isinstance(optimizer, torch.optim.AdamW)
    betas = optimizer.defaults["betas"]
    load_extension("cpu_adam", "CPUAdamBuilder")
    return DeepSpeedCPUAdam(optimizer.param_groups, betas=betas, adamw_mode=adamw, **defaults)


def has_cpu_optimizer(optimizer: Any) -> bool:
    """Return True if DeepSpeed has an optimizer for the CPU that computes what ``optimizer`` does."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        return False
    return not any(optimizer.defaults.get(name) for name in ("amsgrad", "maximize", "differentiable", "lr_decay"))


def _offloads(config: Mapping[str, Any]) -> bool:
    return _device(config, "offload_optimizer") not in (None, "none")


def _device(config: Mapping[str, Any], section: str) -> Any:
    return (config["zero_optimization"].get(section) or {}).get("device")


def share_groups(engine: Any) -> None:
    """Assign the basic optimizer's groups, whose rates a scheduler changes, to DeepSpeed's Adagrad of stages 1 to 3."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if engine.basic_optimizer is not None and optimizer is not engine.basic_optimizer:
        optimizer.param_groups = engine.basic_optimizer.param_groups


def load_extensions(config: Mapping[str, Any]) -> None:
    """Load what DeepSpeed needs for its configuration: the optimizer that it describes, and I/O of disks.

    Raises `ArgumentError`.
    """
    devices = _device(config, "offload_optimizer"), _device(config, "offload_param")
    if "nvme" in devices and config["zero_optimization"]["stage"] == 3:
        load_extension("async_io", "AsyncIOBuilder")
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type")).lower() in ("adam", "adamw") and not optimizer.get("params", {}).get("torch_adam"):
        name, builder = ("cpu_adam", "CPUAdamBuilder") if _offloads(config) else ("fused_adam", "FusedAdamBuilder")
        load_extension(name, builder)
