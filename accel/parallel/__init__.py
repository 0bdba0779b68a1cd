"""Distribution of models over processes: one strategy a module, over a base class that does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from accel.enums import DistributedType
from accel.parallel.base import Strategy
from accel.parallel.ddp import DataParallel
from accel.parallel.ddp import sync_in_backward as _sync_in_backward
from accel.parallel.mesh import Mesh
from accel.parallel.sharded import Sharded, reduce_in_backward
from accel.parallel.single import Single
from accel.parallel.unwrap import data_parallel, unwrap
from accel.parallel.xla import Xla
from accel.plugins import DistributedDataParallelKwargs
from accel.plugins.fsdp import FullyShardedDataParallelPlugin
from accel.plugins.parallelism import ParallelismConfig
from accel.state import AcceleratorState, PartialState
from accel.world import xla

__all__ = ["DataParallel", "Mesh", "Sharded", "Single", "Strategy", "Xla", "choose_strategy", "sync_in_backward"]


def choose_strategy(state: PartialState, plugins: Mapping[type, Any]) -> Strategy:
    """Return the strategy for the world of ``state``; ``plugins``: the script's plug-ins, by class.

    With a `ParallelismConfig`, or if models are sharded, ``state`` gets the mesh.
    """
    plugin: FullyShardedDataParallelPlugin | None = plugins.get(FullyShardedDataParallelPlugin)
    config: ParallelismConfig | None = plugins.get(ParallelismConfig)
    sharded = state.distributed_type == DistributedType.FSDP
    if isinstance(state, AcceleratorState) and (sharded or config is not None):
        mesh = Mesh(config or ParallelismConfig(), state, sharded=sharded, hybrid=plugin is not None and plugin.hybrid)
        state.device_mesh, state.parallelism_config = mesh.device_mesh, mesh.config
        if sharded:
            return Sharded(state, plugin or FullyShardedDataParallelPlugin(), mesh)
    if state.backend == xla.BACKEND:
        return Xla(state)
    return DataParallel(state, plugins.get(DistributedDataParallelKwargs)) if state.use_distributed else Single(state)


def sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Return a context manager whose backward passes synchronize ``model`` after a forward under ``no_sync``."""
    return _sync_in_backward(model) if data_parallel(model) is not None else reduce_in_backward(unwrap(model))
