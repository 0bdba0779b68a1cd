"""How a model is spread over the processes: one strategy a module, over a base that does nothing; not the types it
computes in (`precision`).
"""

from __future__ import annotations

from accel.parallel.base import Strategy
from accel.parallel.ddp import DataParallel
from accel.parallel.single import Single
from accel.parallel.xla import Xla
from accel.plugins import DistributedDataParallelKwargs
from accel.state import PartialState
from accel.world import xla

__all__ = ["DataParallel", "Single", "Strategy", "Xla", "choose_strategy"]


def choose_strategy(state: PartialState, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """Return the strategy for the world that ``state`` describes."""
    if state.backend == xla.BACKEND:
        return Xla(state)
    return DataParallel(state, ddp) if state.use_distributed else Single(state)
