"""Distribution of models over processes: one strategy a module, over a base class that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel.enums import DistributedType
from accel.errors import ArgumentError
from accel.parallel.base import Strategy
from accel.parallel.ddp import DataParallel
from accel.parallel.ddp import sync_in_backward as _sync_in_backward
from accel.parallel.deepspeed import DeepSpeed
from accel.parallel.megatron import Megatron
from accel.parallel.mesh import Mesh
from accel.parallel.sharded import Sharded, reduce_in_backward
from accel.parallel.unwrap import data_parallel, unwrap
from accel.parallel.xla import Xla
from accel.plugins import DistributedDataParallelKwargs
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from accel.state import AcceleratorState, PartialState
from accel.world import xla

__all__ = [
    "DataParallel",
    "DeepSpeed",
    "Megatron",
    "Mesh",
    "Sharded",
    "Strategy",
    "Xla",
    "choose_strategy",
    "sync_in_backward",
]


def choose_strategy(state: PartialState, plugins: Mapping[type, Any]) -> Strategy:
    """Return the strategy for the world of ``state``; ``plugins``: the script's plug-ins, by class.

    With a `ParallelismConfig`, or if models are sharded, ``state`` gets the mesh.
    """
    plugin: FullyShardedDataParallelPlugin | None = plugins.get(FullyShardedDataParallelPlugin)
    config: ParallelismConfig | None = plugins.get(ParallelismConfig)
    sharded = state.distributed_type == DistributedType.FSDP
    mesh = None
    if isinstance(state, AcceleratorState) and state.distributed_type == DistributedType.DEEPSPEED:
        return DeepSpeed(state)
    if config is not None and config.sp_enabled and config.sp_handler.sp_attn_implementation not in (None, "sdpa"):
        raise ArgumentError(
            f"DeepSpeedSequenceParallelConfig(sp_attn_implementation={config.sp_handler.sp_attn_implementation!r}) is "
            "for runs with a deepspeed_plugin: use 'sdpa'"
        )
    if isinstance(state, AcceleratorState) and state.distributed_type == DistributedType.MEGATRON_LM:
        return Megatron(state)
    if isinstance(state, AcceleratorState) and (sharded or config is not None):
        mesh = Mesh(config or ParallelismConfig(), state, sharded=sharded, hybrid=plugin is not None and plugin.hybrid)
        state.device_mesh, state.parallelism_config = mesh.device_mesh, mesh.config
        if sharded or mesh.sizes["tp"] > 1 or mesh.sizes["dp_shard"] > 1:
            return Sharded(state, plugin or (FullyShardedDataParallelPlugin() if sharded else None), mesh)
    if state.backend == xla.BACKEND:
        if mesh is not None and mesh.sizes["cp"] * mesh.sizes["sp"] > 1:
            raise ArgumentError("ParallelismConfig: cp_size and sp_size are not supported under torch_xla")
        return Xla(state)
    if not state.use_distributed:
        return Strategy(state)
    return DataParallel(state, plugins.get(DistributedDataParallelKwargs), mesh)


def sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context manager whose backward passes synchronize ``model`` after a forward under ``no_sync``."""
    return _sync_in_backward(model) if data_parallel(model) is not None else reduce_in_backward(unwrap(model))
