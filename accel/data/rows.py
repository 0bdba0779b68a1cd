"""Rows of batches (nested tensors and lists): counting, cutting and joining them, and dropping repeated samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accel.errors import DataError
from accel.pytree import find_batch_size, honor_type, is_record, map_nested
from accel.state import GradientState


def count_rows(batch: Any) -> int | None:
    """Return the rows of ``batch``: the length of its first tensor, or else of its first list of objects."""
    size = find_batch_size(batch)
    return size if size is not None else next(_list_lengths(batch), None)


def _list_lengths(data: Any) -> Iterator[int]:
    if _is_object_list(data):
        yield len(data)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from _list_lengths(item)
    elif isinstance(data, Mapping):
        for item in data.values():
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
        return _rebuild(data, [cut(item) for item in _items(data)]) if _is_nest(data) else data

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
        return _join_tensors(parts)
    if _is_object_list(first):
        if all(len(part) == size for part, size in zip(parts, sizes, strict=True)):
            return type(first)(item for part in parts for item in part)
    elif _is_nest(first):
        rows = [_items(part) for part in parts]
        if any(len(row) != len(rows[0]) for row in rows) or any(_keys(part) != _keys(first) for part in parts):
            raise DataError("batches of different keys cannot be joined")
        return _rebuild(first, [_join(list(column), sizes) for column in zip(*rows, strict=True)])
    if all(_equal(part, first) for part in parts):
        return first
    raise DataError(f"batches cannot be joined: they hold different values of type {type(first).__name__}, not rows")


def _join_tensors(parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        listing = ", ".join(str(list(part.shape)) for part in parts)
        raise DataError(f"batches of different shapes cannot be joined: {listing}")
    return torch.cat(parts)


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def _is_nest(data: Any) -> bool:
    return isinstance(data, (list, tuple, Mapping)) or is_record(data)


def _keys(data: Any) -> list[Any] | None:
    return list(data) if isinstance(data, Mapping) else None


def _items(data: Any) -> list[Any]:
    if isinstance(data, Mapping):
        return list(data.values())
    if is_record(data):
        return [getattr(data, field.name) for field in dataclasses.fields(data) if field.init]
    return list(data)


def _rebuild(like: Any, items: list[Any]) -> Any:
    if isinstance(like, Mapping):
        mapping = dict(zip(like, items, strict=True))
        return mapping if type(like) is dict else type(like)(mapping)  # type: ignore[call-arg]
    if is_record(like):
        names = [field.name for field in dataclasses.fields(like) if field.init]
        return dataclasses.replace(like, **dict(zip(names, items, strict=True)))
    return honor_type(like, iter(items))


# Dropping the rows of gathered results that stem from repeated samples.


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
        local_rows = leaf.shape[0] // len(counts)
        if local_rows == nominal != rows and (local_rows % rows or _is_repeated(leaf, len(counts))):
            per_sample = 1
        elif local_rows % rows == 0:
            per_sample = local_rows // rows
        else:
            return leaf
        return torch.cat(
            [leaf[rank * local_rows : rank * local_rows + count * per_sample] for rank, count in enumerate(counts)]
        )

    return map_nested(keep, gathered)


def _is_repeated(leaf: torch.Tensor, processes: int) -> bool:
    by_process = leaf.reshape(processes, -1)
    return leaf.ndim == 1 and bool((by_process == by_process[:, :1]).all())


def own_part(items: Any, counts: tuple[int, ...], rank: int) -> Any:
    """Return ``items``, this process's list of one object per sample, without repeated samples."""
    return items[: counts[rank]] if isinstance(items, (list, tuple)) else items
