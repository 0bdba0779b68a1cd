"""Layouts of packed tensors, without a world: what `rows` processes packed is simulated by packing as often."""

from __future__ import annotations

import pytest
import torch

from accel.collectives import flat_buffer
from accel.collectives.flat_buffer import layout_of

CPU = torch.device("cpu")


def various(rank: int) -> list[torch.Tensor]:
    return [
        torch.tensor(rank),
        torch.arange(6.0).reshape(2, 3).t() + rank,
        torch.tensor([True, rank > 0]),
        torch.empty(0, 3),
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.full((1, 3), float(rank)),
        torch.tensor([rank * 1j]),
        torch.full((2, 2), rank, dtype=torch.uint8),
        torch.zeros(1, 2).to(torch.float8_e4m3fn),
    ]


def check(packed: list[list[torch.Tensor]], found: list[torch.Tensor]) -> None:
    for column, joined in zip(zip(*packed, strict=True), found, strict=True):
        expected = torch.cat([part[None] if part.ndim == 0 else part for part in column])
        assert (joined.dtype, joined.shape) == (expected.dtype, expected.shape)
        assert torch.equal(joined.view(torch.uint8) if joined.ndim else joined, expected.view(torch.uint8))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_both_ways_of_taking_apart_agree(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = [various(rank) for rank in range(rows)]
    layout = flat_buffer.Layout(*zip(*[(tensor.shape, tensor.dtype) for tensor in packed[0]], strict=True))
    buffer = torch.cat([layout.pack(tensors, CPU) for tensors in packed])
    assert buffer.numel() == rows * layout.bytes
    for small in (0, 1 << 20, 1 << 20, 0):
        monkeypatch.setattr(flat_buffer, "_SMALL", small)
        check(packed, layout.unpack(buffer, rows, packed[0]))


def test_a_plan_is_made_again_for_another_number_of_rows() -> None:
    tensors = [torch.ones(2), torch.zeros(1)]
    layout = flat_buffer.Layout(tuple(t.shape for t in tensors), tuple(t.dtype for t in tensors))
    for rows in (2, 2, 3, 3, 2):
        found = layout.unpack(torch.cat([layout.pack(tensors, CPU)] * rows), rows, tensors)
        check([tensors] * rows, found)


def test_one_row_is_taken_apart_without_a_copy() -> None:
    tensors = various(1)
    layout = layout_of(tensors)
    buffer = layout.pack(tensors, CPU)
    for mine, found in zip(tensors, layout.unpack_one(buffer, tensors), strict=True):
        assert (found.dtype, found.shape) == (mine.dtype, mine.shape)
        assert found.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() or found.numel() == 0


def test_layouts_are_kept_and_nothing_is_packed_into_nothing() -> None:
    tensors = [torch.empty(0), torch.empty(2, 0, dtype=torch.int64)]
    layout = layout_of(tensors)
    assert layout_of([tensor.clone() for tensor in tensors]) is layout
    assert layout.pack(tensors, CPU).numel() == layout.bytes
    check([tensors] * 3, layout.unpack(torch.cat([layout.pack(tensors, CPU)] * 3), 3, tensors))


def test_what_is_packed_needs_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    buffer = layout_of([parameter]).pack([parameter], CPU)
    assert not buffer.requires_grad
