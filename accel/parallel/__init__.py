"""How a model is spread over the processes: one strategy a module, over a base that does nothing; not the types it
computes in (`precision`).
"""

from __future__ import annotations

from accel.parallel.base import Strategy
from accel.parallel.ddp import DataParallel
from accel.parallel.single import Single
from accel.plugins import DistributedDataParallelKwargs
from accel.state import PartialState

__all__ = ["DataParallel", "Single", "Strategy", "choose_strategy"]


def choose_strategy(state: PartialState, ddp: DistributedDataParallelKwargs | None = None) -> Strategy:
    """Return the strategy for the world that ``state`` describes."""
    return DataParallel(state, ddp) if state.use_distributed else Single(state)
