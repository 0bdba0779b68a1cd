"""Leaving out of gathered results the rows that stem from repeated samples."""

from __future__ import annotations

from typing import Any

import torch

from accel.nested import map_nested
from accel.state import GradientState


def last_counts(state: GradientState) -> tuple[int, ...] | None:
    """Real samples by process in the batch at hand, if it is the active loader's last and some are repetitions."""
    loader = state.active_dataloader
    if loader is None or not loader.end_of_dataloader:
        return None
    return loader.real_counts()


def without_repetitions(gathered: Any, counts: tuple[int, ...], batch: int) -> Any:
    """Keep of each gathered tensor the rows of real samples.

    Process r gave ``batch`` samples of which the first ``counts[r]`` are real. A tensor with k rows a sample keeps k
    rows for each; one whose rows are not a multiple of the samples (a loss a process, say) is not about samples and
    stays.
    """
    if all(count == batch for count in counts):
        return gathered
    total = batch * len(counts)

    def keep(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0 or leaf.shape[0] % total or not leaf.shape[0]:
            return leaf
        rows = leaf.shape[0] // len(counts)
        per_sample = rows // batch
        pieces = [leaf[rank * rows : rank * rows + count * per_sample] for rank, count in enumerate(counts)]
        return torch.cat(pieces)

    return map_nested(keep, gathered)


def own_part(items: Any, counts: tuple[int, ...], rank: int) -> Any:
    """Keep of this process's list of objects, one a sample, those of real samples."""
    return items[: counts[rank]] if isinstance(items, (list, tuple)) else items
