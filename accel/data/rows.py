"""Rows of batches (nested tensors and lists): counting, cutting and joining them, and dropping repeated samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from accel.data.batch_sampler import is_presharded
from accel.errors import CollectiveError, DataError
from accel.gradient_state import ActiveLoader
from accel.pytree import children, find_batch_size, is_record, map_nested, rebuild


def count_rows(batch: Any) -> int | None:
    """Return the rows of ``batch``: the length of its first tensor, or else of its first list of objects."""
    size = find_batch_size(batch)
    return size if size is not None else next(_list_lengths(batch), None)


def _list_lengths(data: Any) -> Iterator[int]:
    if _is_object_list(data):
        yield len(data)
    else:
        for item in (children(data) or {}).values():
            yield from _list_lengths(item)


def _is_object_list(data: Any) -> bool:
    return (
        isinstance(data, (list, tuple))
        and not hasattr(data, "_fields")
        and bool(data)
        and not any(isinstance(item, (torch.Tensor, list, tuple, Mapping)) or is_record(item) for item in data)
    )


def take_rows(batch: Any, rows: slice, process_index: int | None = None, num_processes: int | None = None) -> Any:
    """Return ``batch`` with only ``rows`` of its tensors and of its lists of one object per row.

    The other arguments, which every ``slice_fn`` receives, are unused.
    """
    size = count_rows(batch)

    def cut(data: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return data[rows] if data.ndim else data
        if _is_object_list(data):
            return data[rows] if len(data) == size else data
        items = children(data)
        return data if items is None else rebuild(data, {key: cut(item) for key, item in items.items()})

    return cut(batch)


def join_rows(batches: list[Any]) -> Any:
    """Join the rows of ``batches``, which may differ only in their number of rows; otherwise raise `DataError`."""
    sizes = [count_rows(batch) for batch in batches]
    return batches[0] if len(batches) == 1 else _join(batches, sizes)


def _join(parts: list[Any], sizes: list[int | None]) -> Any:
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise DataError(f"batches of different types cannot be joined: {', '.join(type(p).__name__ for p in parts)}")
    if isinstance(first, torch.Tensor) and first.ndim:
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            listing = ", ".join(str(list(part.shape)) for part in parts)
            raise DataError(f"batches of different shapes cannot be joined: {listing}")
        return torch.cat(parts)
    if _is_object_list(first):
        if all(len(part) == size for part, size in zip(parts, sizes, strict=True)):
            return type(first)(item for part in parts for item in part)
    elif (items := children(first)) is not None:
        rows: list[Any] = [children(part) for part in parts]
        if any(list(row) != list(items) for row in rows):
            raise DataError("batches of different keys cannot be joined")
        return rebuild(first, {key: _join([row[key] for row in rows], sizes) for key in items})
    if all(torch.equal(part, first) if isinstance(first, torch.Tensor) else part == first for part in parts):
        return first
    raise DataError(f"batches cannot be joined: they hold different values of type {type(first).__name__}, not rows")


# Dropping the rows of gathered results that stem from repeated samples.


def last_counts(loader: ActiveLoader) -> tuple[int, ...] | None:
    """Return the real samples by process in the current batch of ``loader``; ``None`` if all are real.

    Raises `CollectiveError` if a process has no batch.
    """
    counts = loader.real_counts()
    if counts is not None and 0 in counts and not loader.even_batches and not is_presharded(loader):
        raise CollectiveError(
            f"gather_for_metrics: process {counts.index(0)} has no batch in the last round, because of "
            "even_batches=False: set even_batches=True, or gather after the loop"
        )
    return counts


def without_repetitions(
    gathered: Any,
    counts: tuple[int, ...],
    rows: int,
    nominal: int | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
) -> Any:
    """Keep only the rows of real samples in each gathered tensor.

    Process r contributed ``rows`` samples; the first ``counts[r]`` are real. A tensor with k rows per sample
    keeps k rows for each. A tensor with ``nominal`` rows per process, as complete batches have, though ``rows``
    are fewer, is one number that the script repeated for each expected sample: it keeps one row per real sample.
    A tensor with any other number of rows is not about samples (a loss per process, for example) and stays.

    ``sizes``: the rows of each tensor on each process before padding; if they differ, only the padding is dropped.
    """
    nominal = rows if nominal is None else nominal
    if rows == nominal and all(count == rows for count in counts):
        return gathered

    unpadded = iter(sizes or ())

    def keep(leaf: torch.Tensor) -> torch.Tensor:
        own_sizes = next(unpadded, ())
        if leaf.ndim == 0 or leaf.shape[0] % len(counts) or not leaf.shape[0]:
            return leaf
        local_rows = leaf.shape[0] // len(counts)
        if len(set(own_sizes)) > 1:
            return _heads(leaf, own_sizes)
        if local_rows == nominal != rows and (local_rows % rows or _is_repeated(leaf, len(counts))):
            per_sample = 1
        elif local_rows % rows == 0:
            per_sample = local_rows // rows
        else:
            return leaf
        return _heads(leaf, [count * per_sample for count in counts])

    return map_nested(keep, gathered)


def _heads(leaf: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Keep the first ``sizes[r]`` of the rows that process r contributed to ``leaf``."""
    return torch.cat([part[:size] for part, size in zip(leaf.chunk(len(sizes)), sizes, strict=True)])


def _is_repeated(leaf: torch.Tensor, processes: int) -> bool:
    by_process = leaf.reshape(processes, -1)
    return leaf.ndim == 1 and bool((by_process == by_process[:, :1]).all())
