"""Every tensor of a run's state comes back: nested in an optimizer's, of one process alone; or it is named."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator
from accel.errors import CheckpointError
from accel.plugins import DistributedDataParallelKwargs
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from accel.pytree import join_tensors, leaves, split_tensors
from accel.tensor_files import SafetensorsFile
from tests.runtime.worlds import outcomes, run, run_one


def test_an_outline_is_safe_to_pickle_and_keeps_all_but_the_tensors(tmp_path: Path) -> None:
    data = {0: {}, "a": [torch.ones(2), (torch.tensor(3), None)], 1: {2: torch.ones(1, dtype=torch.bool)}, "e": ()}
    outline, tensors = split_tensors(data)
    assert list(tensors) == ["['a'][0]", "['a'][1][0]", "[1][2]"]
    torch.save(outline, tmp_path / "outline")
    read = torch.load(tmp_path / "outline", weights_only=True, map_location="cpu")
    assert [leaf.shape for _, leaf in leaves(read) if isinstance(leaf, torch.Tensor)] == [(2,), (), (1,)]
    assert str(join_tensors(read, tensors)) == str(data)


class Nested(torch.optim.SGD):
    """State of every form: nested, beside ``state``, and, if ``shares``, of each process alone."""

    def __init__(self, parameters: Any, shares: bool = False) -> None:
        super().__init__(parameters, lr=0.1)
        self.shares = shares
        self.slow: dict[Any, Any] = {}

    def fill(self, value: float) -> None:
        parameters = [p.detach() for group in self.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            moments = [parameter * value + place for place in range(3)]
            entry = {"moment": moments[0], "pair": (moments[1], {}), "past": [moments[2]], 3: {0: torch.tensor(value)}}
            norm = (parameter * value).sum(1, keepdim=True) if parameter.ndim > 1 else None  # of another shape
            self.state[self.param_groups[0]["params"][number]] = {**entry, "norm": norm, "empty": {}}
            if self.shares:
                share = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                entry["share"] = share.flatten() * value
                self.state[self.param_groups[0]["params"][number]]["share"] = entry["share"]
        self.slow = {number: parameter * value - 1 for number, parameter in enumerate(parameters)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "count": (2, 0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.slow = state["slow"]
        assert state["count"] == (2, 0)
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


def _nested(layout: str, shares: bool, seed: int = 0) -> tuple[Any, Any, Any]:
    accelerator: Any = Accelerator(fsdp_plugin=Plugin(state_dict_type=layout))
    torch.manual_seed(seed)
    model = nn.Linear(3, 5)
    return accelerator, *accelerator.prepare(model, Nested(model.parameters(), shares))


def _full(optimizer: Any) -> str:
    def plain(leaf: Any) -> Any:
        return getattr(leaf, "full_tensor", lambda: leaf)().tolist() if isinstance(leaf, torch.Tensor) else leaf

    return str([(path, plain(leaf)) for path, leaf in leaves(optimizer.state_dict())])


def _functions(accelerator: Any, layout: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """The functions that save and load an optimizer: a checkpoint's, or Accelerate's own for sharded models."""
    if not layout.startswith("compat "):
        return lambda _, __, folder: accelerator.save_state(folder), lambda _, __, folder: accelerator.load_state(
            folder
        )
    from accel.compat.fsdp_checkpoints import load_fsdp_optimizer, save_fsdp_optimizer

    plugin = Plugin(state_dict_type=layout.split()[1])
    return (
        lambda optimizer, model, folder: save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder),
        lambda optimizer, model, folder: load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder),
    )


LAYOUTS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT", "compat SHARDED_STATE_DICT", "compat FULL_STATE_DICT")


def _keep(folder: str) -> list[Any]:
    """The state that was saved in each layout, what the same world reads of it, and what cannot be saved."""
    seen: list[Any] = []
    for layout in LAYOUTS:
        for shares in (False, True):
            accelerator, model, optimizer = _nested(layout.split()[-1], shares)
            optimizer.optimizer.fill(1.5)
            expected, place = _full(optimizer), f"{folder}/{layout}{shares}"
            save, load = _functions(accelerator, layout)
            try:
                save(optimizer, model, place)
            except CheckpointError as error:
                seen.append(str(error))
                accelerator.free_memory()
                continue
            optimizer.optimizer.fill(7.0)
            load(optimizer, model, place)
            seen.append(_full(optimizer) == expected)
            accelerator.free_memory()
            accelerator, model, optimizer = _nested(layout.split()[-1], shares, seed=9)
            _functions(accelerator, layout)[1](optimizer, model, place)  # it has no state yet
            seen.append(_full(optimizer) == expected)
            seen.append(expected)
            accelerator.free_memory()
    return seen


def _load_alone(folder: str) -> list[str]:
    seen = []
    for layout, shares in (*((layout, False) for layout in LAYOUTS), (LAYOUTS[0], True)):
        accelerator, model, optimizer = _nested(layout.split()[-1], shares)
        try:
            _functions(accelerator, layout)[1](optimizer, model, f"{folder}/{layout}{shares}")
            seen.append(_full(optimizer))
        except CheckpointError as error:
            seen.append(str(error))
        accelerator.free_memory()
    return seen


def test_an_optimizers_state_comes_back_in_any_form_and_world(tmp_path: Path) -> None:
    first, second = run(_keep, str(tmp_path))
    for kept in (first, second):
        assert kept[:2] == [True, True]
        assert kept[3:5] == [True, True]  # each process its own shares
        refused = [item for item in kept if isinstance(item, str) and "differs between processes" in item]
        assert len(refused) == 3
        assert all("['share'] is not sharded" in item for item in refused)
        assert sum(item is True for item in kept) == 10
    assert first[5] != second[5]
    *loaded, refusal = run_one(_load_alone, str(tmp_path))
    assert loaded == [first[2]] * len(LAYOUTS)
    assert "['share'] differs between the 2 processes that saved it, and this run has 1" in refusal


def _lbfgs(folder: str) -> tuple[str, str]:
    accelerator: Any = Accelerator(fsdp_plugin=Plugin())
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))
    rows = torch.ones(4, 4).double()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        return loss

    def steps() -> str:
        for _ in range(3):
            optimizer.step(closure)
        return str({name: value.tolist() for name, value in accelerator.get_state_dict(model).items()})

    steps()
    accelerator.save_state(folder)
    expected = steps()
    accelerator.load_state(folder)
    return expected, steps()


def test_lbfgs_goes_on_to_the_bit(tmp_path: Path) -> None:
    expected, after = run(_lbfgs, str(tmp_path / "here"))[0]
    assert after == expected != "{}"


def _partial(folder: str) -> None:
    from torch.distributed.tensor import DTensor, Partial

    accelerator, model, optimizer = _nested("SHARDED_STATE_DICT", False)
    mesh = model.weight.device_mesh
    optimizer.state[model.weight] = {"sum": DTensor.from_local(torch.ones(3), mesh, [Partial()])}
    accelerator.save_state(folder)


def test_another_placement_is_refused_by_name(tmp_path: Path) -> None:
    for ended in outcomes(_partial, str(tmp_path / "here")):
        assert ended.error == "CheckpointError"
        assert "['state']['0.weight']['sum'] is placed as P" in ended.message
        assert "only Shard and Replicate" in ended.message
    assert not (tmp_path / "here").exists()


class Counting(nn.Module):
    """Buffers of each process's own, one in a layout of its own, and one that safetensors cannot hold."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("same", torch.zeros(3))
        self.register_buffer("turned", torch.zeros(2, 3).t())
        values = torch.zeros(4)
        self.register_buffer("sparse", values.to_sparse() if sparse else values)  # torch cannot broadcast those
        self.register_buffer("plus", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("minus", self.get_buffer("plus").conj())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(rows)
        return out


WAYS = (("ddp",), ("SHARDED_STATE_DICT", "FULL_STATE_DICT"))


def _counting(way: str) -> tuple[Any, Any]:
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    handler = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator: Any = (
        Accelerator(kwargs_handlers=[handler]) if way == "ddp" else Accelerator(fsdp_plugin=Plugin(state_dict_type=way))
    )
    return accelerator, accelerator.prepare(Counting(sparse=way == "ddp"))


def _buffers(folder: str, ways: tuple[str, ...], save: bool) -> list[Any]:
    seen: list[Any] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    for way in ways:
        accelerator, model = _counting(way)
        inner = accelerator.unwrap_model(model)
        if save:
            inner.seen.fill_(accelerator.process_index + 1)
            inner.same.fill_(5)
            inner.turned.copy_(torch.arange(6.0).reshape(3, 2))
            value = torch.tensor([0.0, 2, 0, 0])
            inner.sparse.copy_(value.to_sparse() if inner.sparse.is_sparse else value)
            inner.plus.fill_(1 + 2j)
            inner.minus.fill_(1 - 2j)
            accelerator.save_state(f"{folder}/{way}")
            inner.seen.zero_()
        accelerator.load_state(f"{folder}/{way}")
        values = [inner.seen, inner.same, inner.turned, inner.sparse.to_dense(), inner.plus, inner.minus]
        seen.append([value.tolist() for value in values])
        accelerator.free_memory()
    return seen


@pytest.mark.parametrize("ways", WAYS)
def test_buffers_come_back_on_their_process(ways: tuple[str, ...], tmp_path: Path) -> None:
    others = [[5] * 3, [[0, 1], [2, 3], [4, 5]], [0, 2, 0, 0], [1 + 2j] * 2, [1 - 2j] * 2]
    first, second = run(_buffers, str(tmp_path), ways, True)
    assert first == [[[1] * 3, *others]] * len(ways)
    assert second == [[[2] * 3, *others]] * len(ways)
    for way in ways:  # what is equal is in no file of the second process
        file = SafetensorsFile(tmp_path / way / "chunks" / "node_0" / "rank_1.safetensors")
        buffers = [name for name in file.tensors if ".layer." not in name]
        assert buffers == [f"rank.1/2.{'model' if way == 'SHARDED_STATE_DICT' else 'buffer'}.0.seen"]
    others_world = run(_buffers, str(tmp_path), ways, False, processes=3)
    assert [[item for item in seen if not isinstance(item, str)] for seen in others_world] == [first] * 3
    assert [item for item in others_world[0] if isinstance(item, str)] == [
        f"{tmp_path / way} was saved by 2 process(es), this run has 3: random numbers, and each process's own buffers "
        "and rest of an interrupted epoch, differ from that run"
        for way in ways
    ]


def _turned() -> list[Any]:
    """What `prepare` sends of weights and buffers whose memory is not in order."""
    accelerator: Any = Accelerator(fsdp_plugin=Plugin(ignored_modules="frozen"))
    model: Any = nn.Module()
    model.frozen = nn.Linear(2, 3)
    model.layer = nn.Linear(2, 2)
    start = 100.0 * accelerator.process_index
    model.frozen.weight = nn.Parameter(torch.arange(start, start + 6).reshape(2, 3).t())
    model.register_buffer("table", torch.arange(start, start + 6).reshape(2, 3).t())
    model = accelerator.prepare(model)
    return [model.frozen.weight.tolist(), model.table.tolist()]


def test_weights_and_buffers_that_are_not_contiguous_are_sent_as_they_are() -> None:
    assert run(_turned) == [[[[0, 3], [1, 4], [2, 5]]] * 2] * 2
