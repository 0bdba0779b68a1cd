"""Checkpoints of megatron-core's ``dist_checkpointing``, and complete weights from the processes' shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from accel import collectives
from accel.errors import CheckpointError
from accel.parallel.megatron_core import core_of, group_sizes
from accel.parallel.megatron_engine import innermost
from accel.state import PartialState


def save(folder: Path, model: nn.Module, optimizer: Any) -> None:
    """Save ``model``, ``optimizer`` unless None, and the states of generators into ``folder``. Collective."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    kinds = _kinds(optimizer) if optimizer is not None and _has_stepped(optimizer) else []
    state = {"sizes": _sizes(), "optimizers": kinds, **_sharded(model), **_random_states()}
    if kinds:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=_metadata())
    # Its own queue is in a process that imports the script again, which a synchronous save does not need.
    core_of("dist_checkpointing.strategies.filesystem_async")._results_queue = SimpleQueue()
    core_of("dist_checkpointing").save(state, str(folder))


def load(folder: Path, model: nn.Module, optimizer: Any, with_optimizer: bool = True) -> None:
    """Load what `save` has saved in any world into ``model`` and, with ``with_optimizer``, ``optimizer``. Collective.

    An optimizer that was not saved, or had not stepped, begins from the start. Raises `CheckpointError` for files that
    do not fit.
    """
    checkpointing = core_of("dist_checkpointing")
    try:
        common = checkpointing.load_common_state_dict(str(folder))
        same_world = common.get("sizes") == _sizes()
        state = {**_sharded(model), **(_random_states() if same_world else {})}
        has_optimizer = with_optimizer and bool(common.get("optimizers"))
        if has_optimizer:
            if common["optimizers"] != _kinds(optimizer):
                raise CheckpointError(
                    f"{folder}: its optimizer is {' and '.join(common['optimizers'])}, and this run's is "
                    f"{' and '.join(_kinds(optimizer))}: take over use_distributed_optimizer, mixed_precision and "
                    "expert_model_parallel_size, or pass MegatronLMPlugin(no_load_optim=True)"
                )
            _init_states(optimizer)
            state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=_metadata())
            _own_steps(optimizer)
        state = checkpointing.load(state, str(folder))
    except (checkpointing.core.CheckpointingException, CheckpointException) as error:
        causes = getattr(error, "failures", None) or {0: (error,)}
        cause = " ".join(str(next(iter(causes.values()))[0]).split())
        raise CheckpointError(f"{folder}: megatron-core cannot load it: {cause[:300]}") from error
    innermost(model).load_state_dict(state["model"])
    if has_optimizer:  # `load` returns common parts that were not in the request too
        _load_optimizer(optimizer, state["optimizer"])
    else:
        optimizer.reload_model_params()
        for part in optimizer.chained_optimizers if with_optimizer else ():
            part.optimizer.state.clear()
    if same_world:
        core_of("tensor_parallel.random").get_cuda_rng_tracker().set_states(state["generators"])


# Without Apex and Transformer Engine megatron-core steps by torch's optimizers. Its distributed optimizer (0.16.1) then
# cannot load before the first step, misses ``step`` in what it reads, and sets one tensor for all parameters.


def _torchs(optimizer: Any) -> list[Any]:
    kinds = (torch.optim.Adam, torch.optim.AdamW)
    return [part for part in optimizer.chained_optimizers if isinstance(part.optimizer, kinds)]


def _init_states(optimizer: Any) -> None:
    for part in _torchs(optimizer):
        if hasattr(part, "_set_main_param_and_optimizer_states"):
            part.init_state_fn(part.optimizer, part.config)
            for values in part.optimizer.state.values():
                values.setdefault("step", torch.tensor(0.0))


def _own_steps(optimizer: Any) -> None:
    for part in _torchs(optimizer):
        for values in part.optimizer.state.values():
            if "step" in values:
                values["step"] = values["step"].clone()


def _load_optimizer(optimizer: Any, state: Any) -> None:
    for part in _torchs(optimizer):
        assign = getattr(type(part), "_set_main_param_and_optimizer_states", None)
        if assign is not None:
            part._set_main_param_and_optimizer_states = partial(_assign, part, assign)
    optimizer.load_state_dict(state)
    _own_steps(optimizer)


def _assign(part: Any, assign: Any, parameter: Any, tensors: dict[str, Any]) -> None:
    group, position = part.model_param_group_index_map[parameter]
    own = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
    assign(part, parameter, {**{name: own[name] for name in ("step",) if name in own}, **tensors})


def _kinds(optimizer: Any) -> list[str]:
    return [type(part).__name__ for part in optimizer.chained_optimizers]


def _has_stepped(optimizer: Any) -> bool:
    return any(part.optimizer.state for part in optimizer.chained_optimizers if part.optimizer is not None)


def _sizes() -> dict[str, int]:
    sizes = {dimension.partition("_")[0]: size for dimension, size in group_sizes().items()}
    return {"world": dist.get_world_size(), **sizes}


def _metadata() -> dict[str, Any]:
    """Return the options of a format that any world can load."""
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "non_homogeneous_layers": True,
    }


def _sharded(model: nn.Module) -> dict[str, Any]:
    inner: Any = innermost(model)
    return {"model": inner.sharded_state_dict(metadata=_metadata())}


def _random_states() -> dict[str, Any]:
    states = core_of("tensor_parallel.random").get_cuda_rng_tracker().get_states()
    kind = core_of("dist_checkpointing.mapping").ShardedObject
    return {"generators": kind("generators", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)}


def whole_weights(model: nn.Module, state: PartialState) -> dict[str, torch.Tensor]:
    """Return complete weights on the main process of each node, and nothing elsewhere. Collective.

    Names have the numbers of layers in the complete model. Parameters are gathered one at a time.
    """
    mapping = core_of("dist_checkpointing.mapping")
    shards: dict[str, list[Any]] = {}
    sharded = _sharded(model)
    mapping.apply_factories(sharded)
    for shard in _leaves(sharded):
        if isinstance(shard, mapping.ShardedTensor) and mapping.is_main_replica(shard.replica_id):
            shards.setdefault(shard.key, []).append(shard)
    weights: dict[str, torch.Tensor] = {}
    for name in sorted(set(collectives.gather_object(list(shards)))):
        own = [(part.global_shape, part.global_offset, part.data.detach().cpu()) for part in shards.get(name, ())]
        parts = collectives.gather_object(own)
        if state.is_local_main_process:
            shape, _, first = parts[0]
            weights[name] = torch.empty(shape, dtype=first.dtype)
            for _, offsets, data in parts:
                sizes = (1,) * (len(shape) - data.ndim) + tuple(data.shape)
                place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
                weights[name][place] = data.view(sizes)
    return weights


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
