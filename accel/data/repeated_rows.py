"""Removal of repeated samples' rows from gathered results."""

from __future__ import annotations

from typing import Any

import torch

from accel.pytree import map_nested
from accel.state import GradientState


def last_counts(state: GradientState) -> tuple[int, ...] | None:
    """Return the real samples by process in the active loader's current batch; None if all are real."""
    loader = state.active_dataloader
    return None if loader is None else loader.present_counts()


def without_repetitions(gathered: Any, counts: tuple[int, ...], rows: int, nominal: int | None = None) -> Any:
    """Keep only the rows of real samples in each gathered tensor.

    Process r contributed ``rows`` samples; the first ``counts[r]`` are real. A tensor with k rows per sample
    keeps k rows for each. A tensor with ``nominal`` rows per process, as complete batches have, though ``rows``
    are fewer, is one number that the script repeated for each expected sample: it keeps one row per real sample.
    A tensor with any other number of rows is not about samples (a loss per process, for example) and stays.
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
    own = leaf.reshape(processes, -1)
    return leaf.ndim == 1 and bool((own == own[:, :1]).all())


def own_part(items: Any, counts: tuple[int, ...], rank: int) -> Any:
    """Return the real samples' objects of this process's list of one object per sample."""
    return items[: counts[rank]] if isinstance(items, (list, tuple)) else items
