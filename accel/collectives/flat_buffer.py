"""Packing of tensors of any shape and type into one buffer of bytes, for a single collective.

A layout depends only on shapes and types, and a training loop uses the same few: layouts are cached, and the
result of a collective is then reordered by one indexing operation and cut into views.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import cast

import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["Layout", "flatten", "layout_of", "split_flat"]

# The largest element size. Types are laid out by falling element size, so that each group starts at a multiple of its
# own; padding each row to a multiple of this preserves that in every row of a gathered buffer.
_MAX_ELEMENT_SIZE = 16
# Elements are copied as a type of their size that every operation supports.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# An index costs eight bytes an element: above this many bytes in all rows, copying tensor by tensor is as fast.
_SMALL = 1 << 17
_CACHE_SIZE = 64
_on_cpu = attrgetter("is_cpu")
_needs_gradient = attrgetter("requires_grad")


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of ``tensors``, of one type and on one device, in a new buffer."""
    return cast(torch.Tensor, _flatten_dense_tensors(tensors))  # type: ignore[no-untyped-call]


def split_flat(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Undo `flatten`: return views into ``flat`` of the shapes in ``like``."""
    return cast(Sequence[torch.Tensor], _unflatten_dense_tensors(flat, like))  # type: ignore[no-untyped-call]


@dataclass
class Run:
    """Tensors of one type that differ only in their first dimension, ``firsts``; ``places`` are their positions."""

    rest: torch.Size
    places: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    def split(self, elements: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
        """Cut ``elements``, the run gathered from ``rows`` processes, into its tensors."""
        sizes = [rows * first for first in self.firsts]
        joined = elements.view(sum(sizes), *self.rest)
        # This split is unsafe only for autograd, and collectives have no gradients.
        return torch.unsafe_split_with_sizes(joined, sizes)


@dataclass
class Group:
    """The runs of one type, in order.

    ``start``, ``end``: the runs' first byte in a row, and the one past the last.
    """

    dtype: torch.dtype
    runs: list[Run]
    start: int
    end: int = 0

    @property
    def places(self) -> list[int]:
        """The position of each tensor in the caller's list."""
        return [index for run in self.runs for index in run.places]

    @property
    def counts(self) -> list[int]:
        """Elements of each tensor in one row."""
        return [first * run.rest.numel() for run in self.runs for first in run.firsts]

    def order(self, row: int, rows: int) -> torch.Tensor:
        """Return the index of each element in ``rows`` rows of ``row`` bytes, sorted by tensor, then by row."""
        size = self.dtype.itemsize
        lines = torch.arange(rows)[:, None] * (row // size) + self.start // size
        pieces, offset = [], 0
        for count in self.counts:
            pieces.append((lines + torch.arange(offset, offset + count)).reshape(-1))
            offset += count
        return torch.cat(pieces)


@dataclass
class Plan:
    """A plan to unpack small buffers of ``rows`` rows: each group's index, and its runs' numbers of elements."""

    rows: int
    orders: list[torch.Tensor]
    lengths: list[list[int]]


class Layout:
    """The positions of tensors of certain shapes and types in one row of bytes."""

    def __init__(self, shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        self.shapes = shapes
        self.groups = _groups(shapes, dtypes)
        end = self.groups[-1].end if self.groups else 0
        self.filling = -end % _MAX_ELEMENT_SIZE if len(self.groups) > 1 else 0
        self.bytes = end + self.filling
        index_lists = [group.places for group in self.groups]
        order = [index for group in index_lists for index in group]
        self._places = index_lists
        # For each position in the caller's list, the position in the order of the groups.
        self._inverse_order = sorted(range(len(order)), key=order.__getitem__)
        self._sorted = self._inverse_order == order == list(range(len(order)))
        self._was_used = False
        self._plan: Plan | None = None

    def pack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Copy ``tensors`` into one buffer on ``device``, of shape ``(bytes,)``; a single one may share its memory."""
        if any(map(_needs_gradient, tensors)):
            tensors = [tensor.detach() for tensor in tensors]
        if not _all_on_device(tensors, device):
            tensors = [tensor.to(device) for tensor in tensors]
        pieces = []
        for indices in self._places:
            ordered = tensors if self._sorted and len(self._places) == 1 else [tensors[index] for index in indices]
            flat = flatten(ordered) if len(ordered) > 1 else ordered[0].reshape(-1)
            pieces.append(flat.view(torch.uint8))
        if self.filling:
            pieces.append(_zeros(self.filling, device))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def unpack(self, buffer: torch.Tensor, rows: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split ``buffer``, which holds ``rows`` packed rows, into tensors.

        A tensor packed with shape ``(n, …)`` is returned as ``(rows × n, …)``, one without dimensions as ``(rows,)``,
        on the device of its original in ``like``. Small ones may share a storage.
        """
        if self.bytes == 0:
            tensors = [tensor.new_empty(self._joined(index, rows)) for index, tensor in enumerate(like)]
        elif self._was_used and rows * self.bytes <= _SMALL:
            tensors = self._unpack_planned(buffer, rows)
        else:
            tensors = self._unpack_each(buffer.view(rows, -1))
            self._was_used = True
        if _all_on_device(like, buffer.device):
            return tensors
        return [tensor.to(original.device) for tensor, original in zip(tensors, like, strict=True)]

    def unpack_one(self, buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split one packed row into tensors of the packed shapes, which share the storage of ``buffer``."""
        pieces: list[torch.Tensor] = []
        for group, indices in zip(self.groups, self._places, strict=True):
            elements = buffer[group.start : group.end].view(group.dtype)
            pieces.extend(split_flat(elements, [like[index] for index in indices]))
        return self._ordered(pieces)

    def _ordered(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        return pieces if self._sorted else [pieces[index] for index in self._inverse_order]

    def _unpack_each(self, rows: torch.Tensor) -> list[torch.Tensor]:
        count = rows.shape[0]
        pieces: list[torch.Tensor] = []
        for group, indices in zip(self.groups, self._places, strict=True):
            elements = rows[:, group.start : group.end].view(group.dtype)
            columns = elements.split(group.counts, dim=1)  # type: ignore[no-untyped-call]
            for index, column in zip(indices, columns, strict=True):
                # With a single row the piece would be a view that keeps the whole buffer alive.
                pieces.append(column.reshape(self._joined(index, count)).contiguous())
        return self._ordered(pieces)

    def _joined(self, index: int, rows: int) -> tuple[int, ...]:
        first, *rest = self.shapes[index] or (1,)
        return (rows * first, *rest)

    def _unpack_planned(self, buffer: torch.Tensor, rows: int) -> list[torch.Tensor]:
        plan = self._plan
        if plan is None or plan.rows != rows or plan.orders[0].device != buffer.device:
            orders = [group.order(self.bytes, rows).to(buffer.device) for group in self.groups]
            plan = self._plan = Plan(rows, orders, [_lengths(group, rows) for group in self.groups])
        pieces: list[torch.Tensor] = []
        for group, order, lengths in zip(self.groups, plan.orders, plan.lengths, strict=True):
            reordered = buffer.view(_CARRIERS[group.dtype.itemsize]).index_select(0, order).view(group.dtype)
            parts = torch.unsafe_split_with_sizes(reordered, lengths) if len(lengths) > 1 else (reordered,)
            for run, part in zip(group.runs, parts, strict=True):
                pieces.extend(run.split(part, rows))
        return self._ordered(pieces)


def _groups(shapes: Iterable[torch.Size], dtypes: Iterable[torch.dtype]) -> list[Group]:
    runs: dict[torch.dtype, dict[torch.Size, Run]] = {}
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        run = runs.setdefault(dtype, {}).setdefault(shape[1:], Run(shape[1:]))
        run.places.append(index)
        run.firsts.append(shape[0] if shape else 1)
    groups: list[Group] = []
    for dtype in sorted(runs, key=lambda kind: -kind.itemsize):
        group = Group(dtype, list(runs[dtype].values()), groups[-1].end if groups else 0)
        group.end = group.start + sum(group.counts) * dtype.itemsize
        groups.append(group)
    return groups


def _lengths(group: Group, rows: int) -> list[int]:
    return [rows * sum(run.firsts) * run.rest.numel() for run in group.runs]


@lru_cache(maxsize=_MAX_ELEMENT_SIZE)
def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _all_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    if device.type == "cpu":
        return all(map(_on_cpu, tensors))
    return all(tensor.device == device for tensor in tensors)


_layout = lru_cache(maxsize=_CACHE_SIZE)(Layout)


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    """Return the layout for the shapes and types of ``tensors``; recent layouts are cached."""
    return _layout(tuple([tensor.shape for tensor in tensors]), tuple([tensor.dtype for tensor in tensors]))
