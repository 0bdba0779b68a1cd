"""How a model is spread over the processes: one strategy a module, over a base that does nothing; not the types it
computes in (`precision`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.parallel.base import Strategy
from accel.parallel.ddp import DataParallel
from accel.parallel.ddp import sync_in_backward as sync_in_backward
from accel.parallel.single import Single
from accel.parallel.xla import Xla
from accel.plugins import DistributedDataParallelKwargs
from accel.state import PartialState
from accel.world import xla

__all__ = ["DataParallel", "Single", "Strategy", "Xla", "choose_strategy", "sync_in_backward"]


def choose_strategy(state: PartialState, plugins: Mapping[type, Any]) -> Strategy:
    """Return the strategy for the world that ``state`` describes; ``plugins``: what the script says of it, by class."""
    if state.backend == xla.BACKEND:
        return Xla(state)
    return DataParallel(state, plugins.get(DistributedDataParallelKwargs)) if state.use_distributed else Single(state)
