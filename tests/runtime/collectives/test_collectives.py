"""Collectives on nests, in real worlds of two and three processes."""

from __future__ import annotations

import importlib.util
import math
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from accel import collectives
from accel.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    concatenate,
    copy_tensor_to_devices,
    gather,
    gather_object,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)
from accel.errors import CollectiveError
from accel.pytree import map_nested, send_to_device, tensors
from accel.state import PartialState

from ...needs import missing
from ..worlds import run, run_one


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


def _gathered_again() -> list[bool]:
    rank = PartialState().process_index
    nest = _nest(rank)
    first = gather(nest)
    # From the second time on the layout is known, and another way of taking the buffer apart is taken.
    rest = [gather(nest), gather(nest), gather(_nest(rank))]
    alike = [
        torch.equal(a, b) and a.dtype == b.dtype and a.shape == b.shape
        for again in rest
        for a, b in zip(tensors(first), tensors(again), strict=True)
    ]
    again = tensors(rest[0])
    again[0].zero_()
    return [all(alike), all(torch.equal(a, b) for a, b in zip(again[1:], tensors(rest[1])[1:], strict=True))]


def test_gather_gives_the_same_every_time() -> None:
    assert run(_gathered_again, processes=3) == [[True, True]] * 3


def _random_nests(seed: int) -> list[bool]:
    """Random shapes and types against a plain `all_gather` of each tensor."""
    state = PartialState()
    rng = random.Random(seed)
    dtypes = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float16, torch.uint8, torch.complex64)
    right = []
    for _ in range(20):
        nest = []
        for _ in range(rng.randint(1, 12)):
            shape = [rng.randint(0, 4) for _ in range(rng.randint(0, 3))]
            values = torch.tensor(rng.choices(range(9), k=math.prod(shape))).reshape(shape) + state.process_index
            nest.append(values.to(rng.choice(dtypes)).t() if len(shape) == 2 else values.to(rng.choice(dtypes)))
        for _ in range(2):
            for mine, found in zip(nest, gather(nest), strict=True):
                rows = (mine.contiguous() if mine.ndim else mine.reshape(1)).real.double()
                parts = [torch.empty_like(rows) for _ in range(state.num_processes)]
                dist.all_gather(parts, rows)
                right.append(found.dtype == mine.dtype and torch.equal(found.real.double(), torch.cat(parts)))
    return right


def test_gather_agrees_with_one_collective_a_tensor() -> None:
    for right in run(_random_nests, 7):
        assert len(right) > 100
        assert all(right)


def _views(rank: int) -> dict[str, torch.Tensor]:
    scores = torch.arange(8.0).view(4, 2) + rank
    complex_scores = torch.complex(scores, scores)
    return {
        "column": scores[:, 1],
        "column of one row": scores[:1, 0],
        "kept dimension": scores[:, :1],
        "every second": torch.arange(8)[::2] + rank,
        "bfloat16": scores.bfloat16()[:, 1],
        "real part": complex_scores.real[:, 0],
        "conjugate": complex_scores.conj()[:, 1],
        "negative bit": complex_scores.conj().imag,
        "expanded": (torch.ones(1) + rank).expand(4),
        "expanded rows": torch.arange(4.0)[:, None].expand(4, 3),
    }


def _gathered_views() -> list[str]:
    rank = PartialState().process_index
    expected = {name: torch.cat([view, _views(1)[name]]) for name, view in _views(0).items()}
    together = gather((_views(rank), torch.arange(4)))[0]
    alone = {name: gather(view) for name, view in _views(rank).items()}
    return [name for name, value in expected.items() for got in (alone, together) if not torch.equal(got[name], value)]


def test_gather_takes_views_of_any_strides() -> None:
    assert run(_gathered_views) == [[]] * 2


def _broadcast_views() -> list[str]:
    rank = PartialState().process_index
    expected = {name: view.clone() for name, view in _views(1).items()}
    alone, together = _views(rank), _views(rank)
    for view in alone.values():
        broadcast(view, from_process=1)
    broadcast(together, from_process=1)
    return [name for name, value in expected.items() for got in (alone, together) if not torch.equal(got[name], value)]


def test_broadcast_fills_views_of_any_strides() -> None:
    """An expanded tensor has its elements written once."""
    assert run(_broadcast_views) == [[]] * 2


def _library_outputs() -> list[Any]:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    rank = PartialState().process_index
    output = SequenceClassifierOutput(loss=torch.tensor(1.0 + rank), logits=torch.full((2, 3), float(rank)))
    gathered = gather(output)
    batch = BatchEncoding({"input_ids": torch.tensor([[rank, 7]]), "attention_mask": torch.ones(1, 2)})
    encoded = gather(batch)
    moved = send_to_device({"batch": batch, "text": "kept"}, "cpu")
    return [
        type(gathered).__name__, gathered.loss.tolist(), gathered["logits"].shape[0], gathered.hidden_states,
        type(encoded).__name__, encoded["input_ids"].tolist(), type(moved["batch"]).__name__,
        reduce(output).loss.item(),
    ]  # fmt: skip


def test_outputs_and_batches_of_transformers_keep_their_types() -> None:
    if importlib.util.find_spec("transformers") is None:
        missing("transformers", "pip install transformers")
    for seen in run(_library_outputs):
        assert seen == [
            "SequenceClassifierOutput", [1.0, 2.0], 4, None, "BatchEncoding", [[0, 7], [1, 7]], "BatchEncoding", 1.5,
        ]  # fmt: skip


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


def _reductions() -> dict[str, Any]:
    rank = PartialState().process_index
    wide = torch.arange(6.0).reshape(2, 3).t() + rank
    kept = wide.clone()
    found = {
        "max": reduce({"a": torch.tensor([rank, 5 - rank])}, "max")["a"].tolist(),
        "bf16": reduce(torch.tensor([1.0 + rank], dtype=torch.bfloat16), "sum"),
        "complex": reduce(torch.tensor([1.0 + 1j * rank]), "sum").tolist(),
        "wide": reduce(wide, "sum").tolist(),
        "thirds": reduce(torch.tensor([1.0]), "mean", scale=1 / 3).item(),
        "integers": reduce(torch.tensor(rank), "mean").item(),
        "scaled": reduce(torch.tensor([2]), "none", scale=0.5).tolist(),
        "empty": reduce([torch.empty(0), torch.ones(1)], "sum")[0].shape,
        "half": reduce([torch.ones(1), torch.tensor([4e4, 6e-8], dtype=torch.float16)], "mean")[1],
    }
    parameter = torch.nn.Parameter(torch.ones(2))
    found["detached"] = reduce(parameter, "sum").requires_grad
    found["untouched"] = torch.equal(wide, kept) and torch.equal(parameter, torch.ones(2))
    return found


def test_reduce_of_every_kind_and_type() -> None:
    for seen in run(_reductions):
        assert torch.equal(seen.pop("half"), torch.tensor([4e4, 6e-8], dtype=torch.float16))
        bf16 = seen.pop("bf16")
        assert (bf16.dtype, bf16.item()) == (torch.bfloat16, 3.0)
        assert seen == {
            "max": [1, 5], "complex": [2 + 1j], "wide": [[1, 7], [3, 9], [5, 11]], "integers": 0.5, "scaled": [1.0],
            "thirds": torch.tensor(1 / 3).item(), "empty": (0,), "detached": False, "untouched": True,
        }  # fmt: skip


def _own_copy() -> list[bool]:
    data = torch.ones(2)
    return [reduce(data, kind).data_ptr() != data.data_ptr() for kind in ("sum", "mean", "max", "none")]


def test_reduce_never_hands_out_the_original() -> None:
    assert run_one(_own_copy) == [True] * 4
    assert run(_own_copy) == [[True] * 4] * 2


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
    assert calls == ["all_gather"] * 2
    assert untouched
    assert rows[0].tolist() == [[1, 1], [1, 1], [-1, -1]]
    assert rows[1].shape == (1, 3)
    assert columns[1].tolist() == [[0, 1, 1, 1]]
    assert rows[2].shape == ()


def _jagged() -> bool:
    nest = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same = pad_across_processes(nest) is nest
    return same and [w.category for w in caught] == [CannotPadNestedTensorWarning]


@pytest.mark.parametrize("processes", [1, 2])
def test_jagged_tensors_are_left_alone_with_a_warning(processes: int) -> None:
    assert run(_jagged, processes=processes) == [True] * processes


def _copied() -> list[Any]:
    rank = PartialState().process_index
    mine = torch.tensor([[1.5, 2.5]]) if rank == 1 else None
    told = []
    for wrong in (None, torch.ones(1)):
        try:
            copy_tensor_to_devices(wrong)
        except CollectiveError as error:
            told.append(str(error))
    return [copy_tensor_to_devices(mine).tolist(), gather_tensor_shape(mine), *told]


def test_a_tensor_of_one_process_reaches_all() -> None:
    wanted = "one process must have a tensor and the others None, but"
    for seen in run(_copied):
        assert seen == [[[1.5, 2.5]], ((1, 2), torch.float32), f"{wanted} none have one", f"{wanted} [0, 1] have one"]


def _objects() -> Any:
    rank = PartialState().process_index
    return gather_object([rank, {"of": rank}])


def test_gather_object_joins_lists_in_rank_order() -> None:
    assert run(_objects) == [[0, {"of": 0}, 1, {"of": 1}]] * 2


def _refused() -> list[str]:
    told = []
    actions: list[Callable[[], Any]] = [
        lambda: gather({"a": [torch.ones(1), "text"]}),
        lambda: reduce(torch.tensor([True])),
        lambda: reduce(torch.ones(1), "median"),
        lambda: reduce(torch.ones(1, dtype=torch.complex64), "max"),
        lambda: gather_object(3),
        lambda: concatenate([]),
        lambda: concatenate([{"a": "text"}, {"a": "more"}]),
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
        "LeafError: gather: str at ['a'][1] is not a tensor: use gather_object for objects",
        "CollectiveError: reduce: a boolean tensor has no mean: convert it, for instance with .int()",
        "ArgumentError: reduction: 'median' is not one of sum, mean, max, none; did you mean 'mean'?",
        "CollectiveError: reduce: complex numbers have no order, hence no max",
        "LeafError: gather_object: process 0 passed a int: pass a list of objects",
        "ArgumentError: concatenate: nothing to join",
        "LeafError: concatenate: str is not a tensor",
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
    swapped = concatenate([{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}])
    assert [swapped["a"].tolist(), swapped["b"].tolist()] == [[0, 0], [1, 1]]
    record = concatenate([Record(torch.ones(1), {"x": torch.zeros(2)})] * 2)
    assert [type(record), record.more["x"].shape] == [Record, (4,)]
    assert concatenate(["text"]) == "text"
    assert map_nested(lambda leaf: leaf, ("text", None, {"k": 1})) == ("text", None, {"k": 1})
    moved = send_to_device({"x": torch.ones(1), "label": "cat"}, torch.device("meta"))
    assert moved["x"].device.type == "meta"
    assert moved["label"] == "cat"
