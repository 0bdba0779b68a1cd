"""Leaving out of gathered results the rows that stem from repeated samples."""

from __future__ import annotations

from typing import Any

import torch

from accel.pytree import map_nested
from accel.state import GradientState


def last_counts(state: GradientState) -> tuple[int, ...] | None:
    """Real samples by process in the batch at hand of the active loader, if some in it may be repetitions."""
    loader = state.active_dataloader
    return None if loader is None else loader.present_counts()


def without_repetitions(gathered: Any, counts: tuple[int, ...], rows: int, nominal: int | None = None) -> Any:
    """Keep of each gathered tensor the rows of real samples.

    Process r gave ``rows`` samples of which the first ``counts[r]`` are real. A tensor with k rows a sample keeps k
    rows for each. One that has ``nominal`` rows a process, as complete batches have, though ``rows`` are fewer, is one
    number that its script repeated for each sample that it expected: it keeps one row a real sample. One whose rows
    are neither is not about samples (a loss a process, say) and stays.
    """
    nominal = rows if nominal is None else nominal
    if rows == nominal and all(count == rows for count in counts):
        return gathered

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] % len(counts) or not leaf.shape[0]:
            return leaf
        own = leaf.shape[0] // len(counts)
        if own == nominal != rows and (own % rows or _is_repeated(leaf, len(counts))):
            each = 1
        elif own % rows == 0:
            each = own // rows
        else:
            return leaf
        return torch.cat([leaf[rank * own : rank * own + count * each] for rank, count in enumerate(counts)])

    return map_nested(keep, gathered)


def _is_repeated(leaf: torch.Tensor, processes: int) -> bool:
    """Whether each process gave one number, over and over."""
    own = leaf.reshape(processes, -1)
    return leaf.ndim == 1 and bool((own == own[:, :1]).all())


def own_part(items: Any, counts: tuple[int, ...], rank: int) -> Any:
    """Keep of this process's list of objects, one a sample, those of real samples."""
    return items[: counts[rank]] if isinstance(items, (list, tuple)) else items
