"""Debug mode: what every process is told when they come to a collective with data, or calls, that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accel.collectives import broadcast, broadcast_object_list, gather, gather_object, pad_across_processes, reduce
from accel.state import PartialState

from ..worlds import outcomes, run


def _disagree(kind: str) -> Any:
    rank = PartialState().process_index
    if kind == "shape":
        return gather({"logits": torch.zeros(2, 3 + rank)})
    if kind == "rows":
        return gather(torch.ones(1 + rank))
    if kind == "dtype":
        return reduce([torch.zeros(1, dtype=torch.float32 if rank else torch.float64)])
    return broadcast([torch.zeros(1)] * (1 + rank))


def test_debug_mode_names_processes_and_shapes_that_disagree() -> None:
    debug = {"ACCELERATE_DEBUG_MODE": "1"}
    for outcome in outcomes(_disagree, "shape", env=debug):
        assert outcome.error == "CollectiveError"
        where = "process 0 has float32[2, 3] at ['logits']; process 1 has float32[2, 4] at ['logits']"
        assert outcome.message == f"gather: processes disagree: {where}; pad_across_processes makes sizes equal"
    for outcome in outcomes(_disagree, "rows", env=debug):
        where = "process 0 has float32[1]; process 1 has float32[2]"
        assert outcome.message == f"gather: processes disagree: {where}; pad_across_processes makes sizes equal"
    for outcome in outcomes(_disagree, "dtype", env=debug):
        assert "process 0 has float64[1] at [0]; process 1 has float32[1] at [0]" in outcome.message
    for outcome in outcomes(_disagree, "count", env=debug):
        assert outcome.message == "broadcast: processes disagree: process 0 has 1 tensor(s); process 1 has 2 tensor(s)"


def test_rows_of_one_size_that_disagree_are_an_error_on_all_processes() -> None:
    """The backend aborts only if the processes' buffers, which are padded, differ in size."""
    for outcome in outcomes(_disagree, "rows"):
        assert outcome.error == "CollectiveError"
        assert "different types or shapes: pad_across_processes makes sizes equal" in outcome.message


def _disagree_how(kind: str) -> Any:
    rank = PartialState().process_index
    data = torch.ones(2)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "operation": (lambda: gather(data), lambda: reduce(data)),
        "reduction": (lambda: reduce(data, "sum"), lambda: reduce(data, "mean")),
        "source": (lambda: broadcast(data, 0), lambda: broadcast(data, 1)),
        "objects": (lambda: broadcast_object_list([1]), lambda: broadcast_object_list([1, 2])),
        "keys": (lambda: gather({"a": data}), lambda: gather({"b": data})),
        "dimensions": (lambda: pad_across_processes(data), lambda: pad_across_processes(data[None])),
        "sizes": (lambda: pad_across_processes(data), lambda: pad_across_processes(torch.ones(3))),
    }
    return calls[kind][rank]()


def test_debug_mode_names_calls_that_disagree() -> None:
    told = {}
    for kind in ("operation", "reduction", "source", "objects", "keys", "dimensions"):
        first, second = outcomes(_disagree_how, kind, env={"ACCELERATE_DEBUG_MODE": "1"})
        assert (first.error, first.message) == (second.error, second.message) == ("CollectiveError", first.message)
        told[kind] = first.message
    assert told == {
        "operation": "processes called different operations: process 0 called gather; process 1 called reduce",
        "reduction": "reduce: processes disagree: process 0 passed reduction='sum'; process 1 passed reduction='mean'",
        "source": "broadcast: processes disagree: process 0 passed from_process=0; process 1 passed from_process=1",
        "objects": "broadcast_object_list: processes disagree: process 0 passed 1 object(s) from_process=0; "
        "process 1 passed 2 object(s) from_process=0",
        "keys": "gather: processes disagree: process 0 has float32[2] at ['a']; process 1 has float32[2] at ['b']",
        "dimensions": "pad_across_processes: processes disagree: process 0 has float32[-1]; "
        "process 1 has float32[-1, -1]",
    }
    padded = run(_disagree_how, "sizes", env={"ACCELERATE_DEBUG_MODE": "1"})
    assert [tensor.shape for tensor in padded] == [(3,), (3,)]


def _agreed() -> list[Any]:
    rank = PartialState().process_index
    data = {"x": torch.tensor([rank]), "y": torch.ones(2)}
    return [gather(data)["x"].tolist(), reduce(data, "sum")["y"].tolist(), gather_object([rank]), broadcast(data)["x"]]


def test_debug_mode_lets_what_agrees_pass() -> None:
    for seen in run(_agreed, env={"ACCELERATE_DEBUG_MODE": "true"}):
        assert seen[:3] == [[0, 1], [2.0, 2.0], [0, 1]]
        assert seen[3].tolist() == [0]
