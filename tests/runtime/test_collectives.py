"""Collectives on nests, in real worlds of two and three processes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from accel import collectives
from accel.collectives import (
    broadcast,
    broadcast_object_list,
    concatenate,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accel.nested import map_nested, send_to_device, tensors
from accel.state import PartialState

from .worlds import outcomes, run, run_one


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    scores: torch.Tensor
    more: dict[str, torch.Tensor]


def _nest(rank: int) -> dict[str, Any]:
    return {
        "scalar": torch.tensor(float(rank)),
        "rows": torch.full((2, 3), rank, dtype=torch.int64),
        "list": [torch.tensor([rank], dtype=torch.bool), torch.tensor([rank + 0.5], dtype=torch.bfloat16)],
        "pair": Pair(torch.arange(6).reshape(2, 3).t() + rank, torch.empty(0, 4)),
        "record": Record(torch.tensor([rank], dtype=torch.uint8), {"x": torch.tensor([1j * rank])}),
        "ordered": OrderedDict(a=torch.tensor([rank], dtype=torch.float16)),
        "default": defaultdict(list, b=torch.tensor([rank], dtype=torch.float64)),
        "empty_rows": torch.empty(2, 0),
    }


class _Counting:
    """Counts the collectives that torch.distributed is asked for while it runs them."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> _Counting:
        places = [
            (dist, "all_reduce"),
            (dist, "broadcast"),
            (dist, "all_gather_object"),
            (dist, "broadcast_object_list"),
        ]
        self._real = [(place, name, getattr(place, name)) for place, name in [*places, (collectives, "_all_gather")]]
        for place, name, real in self._real:
            setattr(place, name, self._wrap(name.strip("_"), real))
        return self

    def _wrap(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return real(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for place, name, real in self._real:
            setattr(place, name, real)


def _gathered() -> tuple[Any, list[str]]:
    rank = PartialState().process_index
    with _Counting() as counting:
        result = gather(_nest(rank))
    return result, counting.calls


def test_gather_keeps_every_type_and_needs_one_collective() -> None:
    for result, calls in run(_gathered, processes=3):
        assert calls == ["all_gather"]
        assert result["scalar"].tolist() == [0.0, 1.0, 2.0]
        assert result["rows"].tolist() == [[rank] * 3 for rank in (0, 0, 1, 1, 2, 2)]
        assert result["list"][0].tolist() == [False, True, True]
        assert result["list"][1].dtype is torch.bfloat16
        assert result["list"][1].tolist() == [0.5, 1.5, 2.5]
        assert isinstance(result["pair"], Pair)
        transposed = torch.arange(6).reshape(2, 3).t()
        assert torch.equal(result["pair"].left, torch.cat([transposed, transposed + 1, transposed + 2]))
        assert result["pair"].right.shape == (0, 4)
        assert isinstance(result["record"], Record)
        assert result["record"].scores.tolist() == [0, 1, 2]
        assert result["record"].more["x"].tolist() == [0j, 1j, 2j]
        assert isinstance(result["ordered"], OrderedDict)
        assert isinstance(result["default"], defaultdict)
        assert result["default"]["b"].tolist() == [0, 1, 2]
        assert result["empty_rows"].shape == (6, 0)


def _reduced() -> tuple[Any, Any, list[str]]:
    rank = PartialState().process_index
    nest = [
        torch.tensor([1.0 * rank, 2.0]),
        (torch.tensor(3 + rank), torch.tensor([[0.5 + rank]])),
        torch.tensor([rank]),
    ]
    with _Counting() as counting:
        summed = reduce(nest, "sum")
    return summed, reduce(nest, "mean", scale=2.0), counting.calls


def test_reduce_needs_one_collective_a_data_type() -> None:
    for summed, mean, calls in run(_reduced):
        assert calls == ["all_reduce"] * 2
        assert summed[0].tolist() == [1.0, 4.0]
        assert summed[1][0].item() == 7
        assert summed[1][0].dtype is torch.int64
        assert summed[1][1].tolist() == [[2.0]]
        assert summed[2].tolist() == [1]
        assert mean[0].tolist() == [1.0, 4.0]
        assert mean[1][0].item() == 7.0


def _broadcast() -> tuple[Any, bool, list[Any], list[str]]:
    rank = PartialState().process_index
    nest = {"weight": torch.nn.Parameter(torch.full((2,), float(rank))), "flag": torch.tensor([rank == 1])}
    with _Counting() as counting:
        result = broadcast(nest, from_process=1)
    objects = [f"from {rank}", {"rank": rank}]
    in_place = result["weight"] is nest["weight"]
    return tensors(result)[0].tolist(), in_place, broadcast_object_list(objects), counting.calls


def test_broadcast_fills_in_place_with_one_collective() -> None:
    for values, in_place, objects, calls in run(_broadcast):
        assert values == [1.0, 1.0]
        assert in_place
        assert objects == ["from 0", {"rank": 0}]
        assert calls == ["broadcast"]


def _padded() -> tuple[list[Any], list[str], bool]:
    rank = PartialState().process_index
    nest = [torch.ones(2 + rank, 2), torch.ones(1, 3 + rank), torch.tensor(1.0)]
    with _Counting() as counting:
        rows = pad_across_processes(nest, dim=0, pad_index=-1)
        same = pad_across_processes(rows, dim=0)
    columns = pad_across_processes(nest, dim=1, pad_first=True)
    return [rows, columns], counting.calls, all(a is b for a, b in zip(tensors(rows), tensors(same), strict=True))


def test_pad_asks_once_for_a_whole_nest_and_leaves_equal_shapes_alone() -> None:
    (rows, columns), calls, untouched = run(_padded)[0]
    assert calls == ["all_reduce"] * 2
    assert untouched
    assert rows[0].tolist() == [[1, 1], [1, 1], [-1, -1]]
    assert rows[1].shape == (1, 3)
    assert columns[1].tolist() == [[0, 1, 1, 1]]
    assert rows[2].shape == ()


def _objects() -> Any:
    rank = PartialState().process_index
    return gather_object([rank, {"of": rank}])


def test_gather_object_joins_lists_in_rank_order() -> None:
    assert run(_objects) == [[0, {"of": 0}, 1, {"of": 1}]] * 2


def _disagree(kind: str) -> Any:
    rank = PartialState().process_index
    if kind == "shape":
        return gather({"logits": torch.zeros(2, 3 + rank)})
    if kind == "dtype":
        return reduce([torch.zeros(1, dtype=torch.float32 if rank else torch.float64)])
    return broadcast([torch.zeros(1)] * (1 + rank))


def test_debug_mode_names_processes_and_shapes_that_disagree() -> None:
    debug = {"ACCELERATE_DEBUG_MODE": "1"}
    for outcome in outcomes(_disagree, "shape", env=debug):
        assert outcome.error == "CollectiveError"
        where = "process 0 has float32[2, 3] at ['logits']; process 1 has float32[2, 4] at ['logits']"
        assert outcome.message == f"gather: processes disagree: {where}"
    for outcome in outcomes(_disagree, "dtype", env=debug):
        assert "process 0 has float64[1] at [0]; process 1 has float32[1] at [0]" in outcome.message
    for outcome in outcomes(_disagree, "count", env=debug):
        assert outcome.message == "broadcast: processes disagree: process 0 has 1 tensor(s); process 1 has 2 tensor(s)"


def _refused() -> list[str]:
    told = []
    actions: list[Callable[[], Any]] = [
        lambda: gather({"a": [torch.ones(1), "text"]}),
        lambda: reduce(torch.tensor([True])),
        lambda: reduce(torch.ones(1), "median"),
    ]
    for action in actions:
        try:
            action()
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_what_cannot_travel_is_named() -> None:
    told = run(_refused)[0]
    assert told == [
        "CollectiveError: gather: str at ['a'][1] is not a tensor: use gather_object for objects",
        "CollectiveError: reduce: a boolean tensor has no sum: convert it, for instance with .int()",
        "ArgumentError: reduction: 'median' is none of sum, mean, none; did you mean 'mean'?",
    ]


def _alone() -> list[Any]:
    data = [torch.tensor([1, 2]), {"x": torch.ones(())}]
    same = gather(data) is data and broadcast(data) is data and pad_across_processes(data) is data
    return [same, gather_object("whatever"), reduce(torch.tensor([2.0]), "mean", scale=0.5).tolist()]


def test_a_world_of_one_needs_no_collective() -> None:
    assert run_one(_alone) == [True, "whatever", [1.0]]


def test_concatenate_and_maps_keep_structure() -> None:
    joined = concatenate([Pair(torch.ones(1), [torch.zeros(1, 2)]), Pair(torch.zeros(2), [torch.ones(3, 2)])])
    assert isinstance(joined, Pair)
    assert joined.left.tolist() == [1, 0, 0]
    assert joined.right[0].shape == (4, 2)
    assert map_nested(lambda leaf: leaf, ("text", None, {"k": 1})) == ("text", None, {"k": 1})
    moved = send_to_device({"x": torch.ones(1), "label": "cat"}, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["label"] == "cat"
