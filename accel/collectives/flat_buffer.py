"""Packing of tensors of any shape and type into one buffer of bytes, for a single collective."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple
from zlib import crc32

import torch

from accel.errors import CollectiveError

# A row is a multiple of the largest element size. Types are laid out by falling element size, so that each group
# starts at a multiple of its own.
_ALIGNMENT = 16
_CHECKSUM = 8  # bytes of a checksum of the layout, at the end of a row of a small buffer
# Up to this many bytes in all rows, the tensors of a group are unpacked by one copy and share its memory.
_SMALL = 1 << 17
_on_cpu = attrgetter("is_cpu")


def first_elements(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without the dimensions along which ``like`` repeats its memory, as ``expand`` does."""
    if 0 not in like.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in like.stride())]


class Group(NamedTuple):
    """Tensors of one type and shape, at ``places`` in the caller's list and from element ``start`` of a row on.

    ``strided``: shape ``(tensors, rows, elements)`` and strides of a view of the group in a buffer.
    ``joined``: the shape of all unpacked tensors together, concatenated along their first dimension.
    ``sizes``: their sizes along it.
    """

    dtype: torch.dtype
    shape: torch.Size
    places: list[int]
    start: int
    strided: tuple[tuple[int, int, int], tuple[int, int, int]]
    joined: tuple[int, ...]
    sizes: list[int]

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return a view of the group in ``buffer``."""
        return buffer.view(self.dtype).as_strided(*self.strided, self.start)


class Layout:
    """The positions of tensors of certain types and shapes in ``rows`` rows of bytes."""

    def __init__(self, kinds: tuple[tuple[torch.dtype, torch.Size], ...], rows: int) -> None:
        places: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        for index, kind in enumerate(kinds):
            places.setdefault(kind, []).append(index)
        used = sum(dtype.itemsize * shape.numel() for dtype, shape in kinds)
        self._small = rows * used <= _SMALL
        self._checksum = crc32(repr(kinds).encode())
        end = self._checksum.to_bytes(_CHECKSUM, sys.byteorder) if self._small else b""
        end = bytes(-(used + len(end)) % _ALIGNMENT) + end
        self.bytes = used + len(end)
        self._end = torch.tensor(list(end), dtype=torch.uint8)
        self._groups: list[Group] = []
        start = 0
        for dtype, shape in sorted(places, key=lambda kind: -kind[0].itemsize):
            indices, size, (first, *rest) = places[dtype, shape], shape.numel(), shape or (1,)
            strided = (len(indices), rows, size), (size, self.bytes // dtype.itemsize, 1)
            joined, sizes = (len(indices) * rows * first, *rest), [rows * first] * len(indices)
            self._groups.append(Group(dtype, shape, indices, start // dtype.itemsize, strided, joined, sizes))
            start += len(indices) * size * dtype.itemsize
        order = [index for group in self._groups for index in group.places]
        # For each position in the caller's list, the position in the order of the groups.
        self._inverse_order = sorted(range(len(order)), key=order.__getitem__)

    def pack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return a new buffer on ``device``, of one row, with a copy of ``tensors``."""
        if not _all_on_device(tensors, device):
            tensors = [tensor.to(device) for tensor in tensors]
        with torch.no_grad():
            stacks = [torch.stack([tensors[index] for index in group.places]) for group in self._groups]
        pieces = [stack.view(-1).view(torch.uint8) for stack in stacks]
        if self._end.numel():
            pieces.append(self._end if device.type == "cpu" else pieces[0].new_zeros(self._end.shape))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def check(self, buffer: torch.Tensor) -> None:
        """Raise `CollectiveError` if a row in ``buffer`` was packed with another layout.

        Only of small buffers, which have room for a checksum, on a CPU: a GPU would have to be waited for.
        """
        step = self.bytes // _CHECKSUM
        if not self._small or not buffer.is_cpu:
            return
        numbers: Any = buffer.numpy()  # faster than torch's views
        if {self._checksum} != set(numbers.view("int64")[step - 1 :: step].tolist()):
            raise CollectiveError(
                "processes have tensors of different types or shapes: pad_across_processes makes sizes equal, and "
                "ACCELERATE_DEBUG_MODE=1 names the processes and shapes"
            )

    def split(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the tensors in a buffer of one row."""
        return self._ordered([part.view(group.shape) for group in self._groups for part in group.view(buffer).unbind()])

    def unpack(self, buffer: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors in ``buffer``, joined over its rows.

        A tensor packed with shape ``(n, …)`` is returned as ``(rows × n, …)``, one without dimensions as ``(rows,)``,
        on the device of its original in ``like``. Small ones may share a storage.
        """
        parts: list[torch.Tensor] = []
        for group in self._groups:
            if self._small:
                joined = group.view(buffer).contiguous().view(group.joined)
                # This split is unsafe only for autograd, and collectives have no gradients.
                parts += torch.unsafe_split_with_sizes(joined, group.sizes)
            else:
                shape = (group.sizes[0], *group.joined[1:])
                parts += [part.contiguous().view(shape) for part in group.view(buffer).unbind()]
        ordered = self._ordered(parts)
        if _all_on_device(like, buffer.device):
            return ordered
        return [part.to(original.device) for part, original in zip(ordered, like, strict=True)]

    def _ordered(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[index] for index in self._inverse_order]


def _all_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> bool:
    if device.type == "cpu":
        return all(map(_on_cpu, tensors))
    return all(tensor.device == device for tensor in tensors)


_layout = lru_cache(maxsize=64)(Layout)


def layout_of(tensors: Sequence[torch.Tensor], rows: int = 1) -> Layout:
    """Return the layout for the types and shapes of ``tensors``; recent layouts are cached."""
    return _layout(tuple([(tensor.dtype, tensor.shape) for tensor in tensors]), rows)
