"""Small tools on nests, in one process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from accel.collectives.operations import (
    TensorInformation,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    ignorant_find_batch_size,
    initialize_tensors,
    listify,
    pad_input_tensors,
    recursively_apply,
)
from accel.errors import ArgumentError, LeafError
from accel.pytree import honor_type, is_namedtuple, send_to_device, slice_tensors


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    scores: Any
    name: str


class Placed:
    """Has a ``to`` that does not know ``non_blocking``."""

    def __init__(self, where: Any = None) -> None:
        self.where = where

    def to(self, device: Any) -> Placed:
        return Placed(device)


def nest() -> dict[str, Any]:
    rows = torch.arange(6, dtype=torch.bfloat16).reshape(3, 2)
    return {"rows": rows, "pair": Pair([torch.ones(3)], "text"), "record": Record(torch.zeros(3, 1), "r")}


def test_recursively_apply_reaches_what_the_test_accepts() -> None:
    doubled = recursively_apply(lambda x, by, plus=0: x * by + plus, {"a": [1, "b"], "c": (2,)}, 2, plus=1,
                                test_type=lambda leaf: isinstance(leaf, int))  # fmt: skip
    assert doubled == {"a": [3, "b"], "c": (5,)}
    with pytest.raises(LeafError, match="len: a leaf of type str does not satisfy is_torch_tensor"):
        recursively_apply(len, ["text"], error_on_other_type=True)
    with pytest.raises(TypeError):
        recursively_apply(len, ["text"], error_on_other_type=True)


def test_structure_and_tensors_made_from_it() -> None:
    structure = get_data_structure(nest())
    assert structure["rows"] == TensorInformation(torch.Size([3, 2]), torch.bfloat16)
    made = initialize_tensors({"rows": structure["rows"], "pair": structure["pair"]})
    assert (made["rows"].shape, made["rows"].dtype) == ((3, 2), torch.bfloat16)
    assert isinstance(made["pair"], Pair)
    assert made["pair"].left[0].shape == (3,)
    assert made["pair"].right == "text"
    assert get_shape(nest())["record"].scores == [3, 1]
    assert type(initialize_tensors(OrderedDict(a=structure["rows"]))) is OrderedDict


def test_batch_sizes() -> None:
    assert find_batch_size(nest()) == 3
    assert find_batch_size([Record(torch.zeros(4, 1), "r")]) == 4
    assert ignorant_find_batch_size(["text", torch.ones(2)]) is None
    assert ignorant_find_batch_size([]) is None
    with pytest.raises(ArgumentError, match="an empty list has no batch size"):
        find_batch_size({"a": []})
    with pytest.raises(LeafError, match="a str comes first"):
        find_batch_size(["text"])
    with pytest.raises(ValueError, match="a tensor without dimensions"):
        find_batch_size(torch.tensor(1))


def test_devices_lists_and_slices() -> None:
    assert find_device(["text", {"a": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert find_device("text") is None
    assert listify(nest())["rows"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    cut = slice_tensors({"a": torch.arange(4), "b": torch.tensor(1), "c": "text"}, slice(1, 3))
    assert [cut["a"].tolist(), cut["b"].item(), cut["c"]] == [[1, 2], 1, "text"]
    assert is_namedtuple(Pair(1, 2))
    assert not is_namedtuple((1, 2))
    assert honor_type(Pair(1, 2), iter([3, 4])) == Pair(3, 4)


@pytest.mark.parametrize(("rows", "processes", "expected"), [(3, 4, 4), (4, 4, 4), (5, 4, 8), (6, 3, 6)])
def test_rows_are_completed_to_a_multiple_of_the_processes(rows: int, processes: int, expected: int) -> None:
    padded = pad_input_tensors({"x": torch.ones(rows, 2)}, rows, processes)["x"]
    assert padded.shape == (expected, 2)
    assert padded.sum().item() == rows * 2
    assert pad_input_tensors(torch.ones(2, rows), rows, processes, dim=1).shape == (2, expected)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_whatever_can_move_moves(non_blocking: bool) -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    data = {
        "x": torch.ones(1), "kept": torch.ones(1), "deep": [{"kept": torch.ones(1)}, "text"], "packed": packed,
        "own": Placed(), "record": Record(torch.ones(1), "r"),
    }  # fmt: skip
    moved = send_to_device(data, "meta", non_blocking, skip_keys="kept")
    assert [moved["x"].device.type, moved["kept"].device.type] == ["meta", "cpu"]
    assert [moved["deep"][0]["kept"].device.type, moved["deep"][1]] == ["cpu", "text"]
    assert isinstance(moved["packed"], PackedSequence)
    assert moved["packed"].data.device.type == "meta"
    assert moved["own"].where == "meta"
    assert moved["record"].scores.device.type == "meta"
    assert send_to_device(data, "meta", skip_keys=["kept", "x"])["x"] is data["x"]
