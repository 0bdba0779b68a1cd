"""Tensors of any shape and type, side by side in one buffer of bytes, so that one collective carries them all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The longest element there is. Types are laid out by falling element size, so that each group starts at a multiple of
# its own; the end is filled up to this, so that this holds in every row of a gathered buffer too.
_LONGEST = 16


@dataclass(frozen=True)
class Group:
    """The tensors of one type: their places in the list given, first byte, and past the last."""

    dtype: torch.dtype
    places: list[int]
    start: int
    end: int


def pack(tensors: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[Group]]:
    """Copy ``tensors`` into one buffer of bytes on ``device``; a single one that lies there already is not copied.

    Returns the buffer, of shape ``(bytes,)``, and its layout.
    """
    by_type: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        by_type.setdefault(tensor.dtype, []).append(place)
    groups: list[Group] = []
    pieces: list[torch.Tensor] = []
    end = 0
    for dtype in sorted(by_type, key=lambda kind: -kind.itemsize):
        places = by_type[dtype]
        flat = [tensors[place].detach().reshape(-1) for place in places]
        piece = flat[0] if len(flat) == 1 else torch.cat(flat)
        pieces.append(piece.to(device).view(torch.uint8))
        start, end = end, end + pieces[-1].numel()
        groups.append(Group(dtype, places, start, end))
    if len(pieces) > 1:
        pieces.append(torch.zeros(-end % _LONGEST, dtype=torch.uint8, device=device))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)), groups


def unpack(rows: torch.Tensor, groups: list[Group], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Take ``rows``, of shape ``(processes, bytes)``, apart.

    A tensor packed with shape ``(n, …)`` comes back as ``(processes × n, …)``, one without dimensions as
    ``(processes,)``, on the device of its original in ``like``.
    """
    found: list[torch.Tensor | None] = [None] * len(like)
    for group in groups:
        elements = rows[:, group.start : group.end].view(group.dtype)
        originals = [like[place] for place in group.places]
        columns = elements.split([original.numel() for original in originals], dim=1)  # type: ignore[no-untyped-call]
        for place, original, column in zip(group.places, originals, columns, strict=True):
            shape = original.shape
            count = rows.shape[0] * (shape[0] if shape else 1)
            whole = column.reshape(count, *shape[1:])
            found[place] = whole if original.device == rows.device else whole.to(original.device)
    return [tensor for tensor in found if tensor is not None]
