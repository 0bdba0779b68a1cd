"""Layouts of packed tensors, without a world: what `rows` processes packed is simulated by packing as often."""

from __future__ import annotations

import pytest
import torch

from accel.collectives import flat_buffer
from accel.collectives.flat_buffer import Layout, layout_of

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
        torch.full((1, 3), 7.0 + rank),
        torch.arange(4)[3::2] + rank,
        torch.arange(6, dtype=torch.int64).reshape(3, 2).add(rank)[:1, 1],
    ]


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_rows_are_unpacked_by_tensor(rows: int, small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_buffer, "_SMALL", small)
    packed = [various(rank) for rank in range(rows)]
    layout = Layout(tuple((tensor.dtype, tensor.shape) for tensor in packed[0]), rows)
    buffer = torch.cat([layout.pack(tensors, CPU) for tensors in packed])
    assert buffer.numel() == rows * layout.bytes
    for column, joined in zip(zip(*packed, strict=True), layout.unpack(buffer, packed[0]), strict=True):
        expected = torch.cat([part[None] if part.ndim == 0 else part for part in column])
        assert (joined.dtype, joined.shape) == (expected.dtype, expected.shape)
        assert joined.is_contiguous()
        assert torch.equal(joined.view(torch.uint8), expected.view(torch.uint8))


def test_one_row_is_split_without_a_copy() -> None:
    tensors = various(1)
    layout = layout_of(tensors)
    buffer = layout.pack(tensors, CPU)
    for mine, view in zip(tensors, layout.split(buffer), strict=True):
        assert torch.equal(view.float(), mine.float()) if not mine.is_complex() else torch.equal(view, mine)
        assert (view.dtype, view.shape) == (mine.dtype, mine.shape)
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() or view.numel() == 0


def test_large_tensors_do_not_share_memory() -> None:
    tensors = [torch.ones(1 << 15), torch.zeros(1 << 15)]
    layout = layout_of(tensors, 2)
    first, second = layout.unpack(torch.cat([layout.pack(tensors, CPU)] * 2), tensors)
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 1 << 18


def test_tensors_without_elements_keep_their_shapes() -> None:
    tensors = [torch.empty(0), torch.empty(2, 0, dtype=torch.int64)]
    layout = layout_of(tensors, 3)
    buffer = torch.cat([layout.pack(tensors, CPU)] * 3)
    assert [part.shape for part in layout.unpack(buffer, tensors)] == [(0,), (6, 0)]


def test_packed_tensors_need_no_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not layout_of([parameter]).pack([parameter], CPU).requires_grad
