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

__all__ = ["Layout", "cut", "flatten", "layout_of"]

# The longest element there is. Types are laid out by falling element size, so that each group starts at a multiple of
# its own; the end is filled up to this, so that this holds in every row of a gathered buffer too.
_LONGEST = 16
# Elements are moved under a type of their size that every operation knows, whatever they mean.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# An index costs eight bytes an element: above this many bytes in all rows, copying tensor by tensor is as fast.
_SMALL = 1 << 17
_KEPT = 64
_on_cpu = attrgetter("is_cpu")
_needs_gradient = attrgetter("requires_grad")


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of ``tensors``, of one type and on one device, in a new buffer."""
    return cast(torch.Tensor, _flatten_dense_tensors(tensors))  # type: ignore[no-untyped-call]


def cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Undo `flatten`: return views into ``flat`` of the shapes in ``like``."""
    return cast(Sequence[torch.Tensor], _unflatten_dense_tensors(flat, like))  # type: ignore[no-untyped-call]


@dataclass
class Run:
    """Tensors of one type that differ only in their first dimension: gathered, they are the parts of one tensor."""

    rest: torch.Size
    places: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)

    def cut(self, elements: torch.Tensor, rows: int) -> Sequence[torch.Tensor]:
        """Cut ``elements``, the run gathered from ``rows`` processes, into its tensors."""
        sizes = [rows * first for first in self.firsts]
        whole = elements.view(sum(sizes), *self.rest)
        # "Unsafe" is this split for gradients alone, which no collective carries.
        return torch.unsafe_split_with_sizes(whole, sizes)


@dataclass
class Group:
    """The runs of one type, in order.

    ``start``, ``end``: their first byte in a row, and the one past the last.
    """

    dtype: torch.dtype
    runs: list[Run]
    start: int
    end: int = 0

    @property
    def places(self) -> list[int]:
        """The position of each tensor in the given list."""
        return [place for run in self.runs for place in run.places]

    @property
    def counts(self) -> list[int]:
        """Elements of each tensor in one row."""
        return [first * run.rest.numel() for run in self.runs for first in run.firsts]

    def order(self, row: int, rows: int) -> torch.Tensor:
        """Return the position of each element in ``rows`` rows of ``row`` bytes: by tensor, and within it by row."""
        size = self.dtype.itemsize
        lines = torch.arange(rows)[:, None] * (row // size) + self.start // size
        pieces, offset = [], 0
        for count in self.counts:
            pieces.append((lines + torch.arange(offset, offset + count)).reshape(-1))
            offset += count
        return torch.cat(pieces)


@dataclass
class Plan:
    """A plan to unpack small buffers of ``rows`` rows: the index of each group, and its runs' numbers of elements."""

    rows: int
    orders: list[torch.Tensor]
    lengths: list[list[int]]


class Layout:
    """The positions of tensors of certain shapes and types in one row of bytes."""

    def __init__(self, shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        self.shapes = shapes
        self.groups = _groups(shapes, dtypes)
        end = self.groups[-1].end if self.groups else 0
        self.filling = -end % _LONGEST if len(self.groups) > 1 else 0
        self.bytes = end + self.filling
        places = [group.places for group in self.groups]
        packed = [place for group in places for place in group]
        self._places = places
        # Where the tensor of each place comes when the groups are gone through one after the other.
        self._back = sorted(range(len(packed)), key=packed.__getitem__)
        self._sorted = self._back == packed == list(range(len(packed)))
        self._seen = False
        self._plan: Plan | None = None

    def pack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Copy ``tensors`` into one buffer on ``device``, of shape ``(bytes,)``; a single one may share its memory."""
        if any(map(_needs_gradient, tensors)):
            tensors = [tensor.detach() for tensor in tensors]
        if not _all_on(tensors, device):
            tensors = [tensor.to(device) for tensor in tensors]
        pieces = []
        for places in self._places:
            mine = tensors if self._sorted and len(self._places) == 1 else [tensors[place] for place in places]
            flat = flatten(mine) if len(mine) > 1 else mine[0].reshape(-1)
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
            found = [tensor.new_empty(self._joined(place, rows)) for place, tensor in enumerate(like)]
        elif self._seen and rows * self.bytes <= _SMALL:
            found = self._unpack_planned(buffer, rows)
        else:
            found = self._unpack_each(buffer.view(rows, -1))
            self._seen = True
        if _all_on(like, buffer.device):
            return found
        return [tensor.to(original.device) for tensor, original in zip(found, like, strict=True)]

    def unpack_one(self, buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Split one packed row into tensors of the packed shapes, which share the storage of ``buffer``."""
        pieces: list[torch.Tensor] = []
        for group, places in zip(self.groups, self._places, strict=True):
            elements = buffer[group.start : group.end].view(group.dtype)
            pieces.extend(cut(elements, [like[place] for place in places]))
        return self._ordered(pieces)

    def _ordered(self, pieces: list[torch.Tensor]) -> list[torch.Tensor]:
        return pieces if self._sorted else [pieces[index] for index in self._back]

    def _unpack_each(self, rows: torch.Tensor) -> list[torch.Tensor]:
        count = rows.shape[0]
        pieces: list[torch.Tensor] = []
        for group, places in zip(self.groups, self._places, strict=True):
            elements = rows[:, group.start : group.end].view(group.dtype)
            columns = elements.split(group.counts, dim=1)  # type: ignore[no-untyped-call]
            for place, column in zip(places, columns, strict=True):
                # Of a single row each, the piece would be a view that keeps the whole buffer.
                pieces.append(column.reshape(self._joined(place, count)).contiguous())
        return self._ordered(pieces)

    def _joined(self, place: int, rows: int) -> tuple[int, ...]:
        first, *rest = self.shapes[place] or (1,)
        return (rows * first, *rest)

    def _unpack_planned(self, buffer: torch.Tensor, rows: int) -> list[torch.Tensor]:
        plan = self._plan
        if plan is None or plan.rows != rows or plan.orders[0].device != buffer.device:
            orders = [group.order(self.bytes, rows).to(buffer.device) for group in self.groups]
            plan = self._plan = Plan(rows, orders, [_lengths(group, rows) for group in self.groups])
        pieces: list[torch.Tensor] = []
        for group, order, lengths in zip(self.groups, plan.orders, plan.lengths, strict=True):
            moved = buffer.view(_CARRIERS[group.dtype.itemsize]).index_select(0, order).view(group.dtype)
            parts = torch.unsafe_split_with_sizes(moved, lengths) if len(lengths) > 1 else (moved,)
            for run, part in zip(group.runs, parts, strict=True):
                pieces.extend(run.cut(part, rows))
        return self._ordered(pieces)


def _groups(shapes: Iterable[torch.Size], dtypes: Iterable[torch.dtype]) -> list[Group]:
    runs: dict[torch.dtype, dict[torch.Size, Run]] = {}
    for place, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        run = runs.setdefault(dtype, {}).setdefault(shape[1:], Run(shape[1:]))
        run.places.append(place)
        run.firsts.append(shape[0] if shape else 1)
    groups: list[Group] = []
    for dtype in sorted(runs, key=lambda kind: -kind.itemsize):
        group = Group(dtype, list(runs[dtype].values()), groups[-1].end if groups else 0)
        group.end = group.start + sum(group.counts) * dtype.itemsize
        groups.append(group)
    return groups


def _lengths(group: Group, rows: int) -> list[int]:
    return [rows * sum(run.firsts) * run.rest.numel() for run in group.runs]


@lru_cache(maxsize=_LONGEST)
def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _all_on(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    if device.type == "cpu":
        return all(map(_on_cpu, tensors))
    return all(tensor.device == device for tensor in tensors)


_layout = lru_cache(maxsize=_KEPT)(Layout)


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    """Return the layout for such tensors; recent layouts are cached."""
    return _layout(tuple([tensor.shape for tensor in tensors]), tuple([tensor.dtype for tensor in tensors]))
