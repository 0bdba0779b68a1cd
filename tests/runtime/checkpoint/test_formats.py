"""Accelerate's checkpoints and ours, read by each other's loader; and models saved by themselves."""

from __future__ import annotations

import json
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from accel import Accelerator, ProjectConfiguration
from accel.checkpoint import clean_state_dict_for_safetensors, load, save
from accel.checkpoint.weights import read_weights, save_weights, shards, size_in_bytes
from accel.errors import ArgumentError, CheckpointError
from tests.marks import long

from ..small import Tally
from ..worlds import outcomes, run, run_one


def _trained(accelerator: Any) -> list[Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    tally = Tally()
    accelerator.register_for_checkpointing(tally)
    return [*accelerator.prepare(model, optimizer, scheduler), tally]


def _step(model: Any, optimizer: Any, scheduler: Any, tally: Tally) -> None:
    for _ in range(2):
        model(torch.ones(4, 3) * torch.arange(4)[:, None]).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    tally.value = {"at": 2}


def _state(model: Any, optimizer: Any, scheduler: Any, tally: Tally) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {str(key).removeprefix("module."): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    draws = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
    return [plain(model.state_dict()), plain(optimizer.state_dict()), scheduler.get_last_lr(), tally.value, draws]


def _make(package: str) -> Any:
    warnings.simplefilter("ignore")
    if package == "accel":
        return Accelerator(cpu=True)
    import accelerate

    return accelerate.Accelerator(cpu=True)


def _write(package: str, directory: str, safe: bool) -> Any:
    accelerator = _make(package)
    objects = _trained(accelerator)
    _step(*objects)
    accelerator.step = 5
    accelerator.save_state(directory, safe_serialization=safe)
    return _state(*objects)


def _read(package: str, directory: str) -> Any:
    accelerator = _make(package)
    objects = _trained(accelerator)
    accelerator.load_state(directory)
    return [accelerator.step, _state(*objects)]


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("processes", [2, *long(1)])
@pytest.mark.parametrize("safe", [True, *long(False)])
@pytest.mark.parametrize(("writer", "reader"), [("accelerate", "accel"), ("accel", "accelerate")])
def test_each_reads_the_others_checkpoints(
    tmp_path: Path, writer: str, reader: str, safe: bool, processes: int
) -> None:
    """Weights, optimizer, schedule, custom objects, generators and step, to the bit."""
    directory = str(tmp_path / "here")
    written = run(_write, writer, directory, safe, processes=processes)
    read = run(_read, reader, directory, processes=processes)
    assert read == [[5, state] for state in written]


@pytest.mark.usefixtures("accelerate")
def test_accelerates_with_another_number_of_processes(tmp_path: Path) -> None:
    directory = str(tmp_path / "here")
    written = run(_write, "accelerate", directory, True)
    [(step, state)] = run(_read, "accel", directory, processes=1)
    assert (step, state) == (5, written[0])


def _shuffled(package: str, directory: str, resume: bool) -> Any:
    accelerator = _make(package)
    loader: Any = torch.utils.data.DataLoader(TensorDataset(torch.arange(6)), shuffle=True)
    _, loader = accelerator.prepare(nn.Linear(1, 1), loader)
    if resume:
        accelerator.load_state(directory, load_kwargs={"weights_only": True}, map_location="cpu", strict=True)
    else:
        accelerator.save_state(directory)
    return len(list(loader))


@pytest.mark.usefixtures("accelerate")
def test_a_checkpoint_with_loaders(tmp_path: Path) -> None:
    run_one(_shuffled, "accelerate", str(tmp_path / "theirs"), False)
    assert run_one(_shuffled, "accel", str(tmp_path / "theirs"), True) == 6
    run_one(_shuffled, "accel", str(tmp_path / "ours"), False)
    assert run_one(_shuffled, "accelerate", str(tmp_path / "ours"), True) == 6


def _refused(directory: str, how: dict[str, Any]) -> None:
    accelerator = Accelerator()
    accelerator.prepare(nn.Linear(1, 1))
    accelerator.load_state(directory, **how)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"load_kwargs": {"weights_only": False}}, "weights_only=False would run code"),
        ({"load_kwargs": {"weight_only": True}}, "did you mean 'weights_only'?"),
        ({"map_location": "on_devise"}, "did you mean 'on_device'?"),
    ],
)
def test_options_that_cannot_be_are_named(tmp_path: Path, how: dict[str, Any], said: str) -> None:
    ended = outcomes(_refused, str(tmp_path), how, processes=1)[0]
    assert ended.error == "ArgumentError"
    assert said in ended.message


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight


def _save_model(directory: str, package: str, size: Any, safe: bool) -> Any:
    accelerator = _make(package)
    torch.manual_seed(1)
    model = accelerator.prepare(_Tied())
    accelerator.save_model(model, directory, max_shard_size=size, safe_serialization=safe)
    return {name: value.tolist() for name, value in accelerator.unwrap_model(model).state_dict().items()}


def _load_model(directory: str) -> Any:
    warnings.simplefilter("ignore")
    import accelerate

    model = _Tied()
    accelerate.load_checkpoint_in_model(model, directory)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.usefixtures("accelerate")
@pytest.mark.parametrize("processes", [2, *long(1)])
@pytest.mark.parametrize("safe", [True, *long(False)])
@pytest.mark.parametrize("size", ["10GB", 100])
def test_a_saved_model_is_what_accelerate_loads(tmp_path: Path, size: Any, safe: bool, processes: int) -> None:
    place = tmp_path / "model"
    state = run(_save_model, str(place), "accel", size, safe, processes=processes)[0]
    assert run_one(_load_model, str(place)) == state
    names = sorted(entry.name for entry in place.iterdir())
    stem, suffix = ("model", ".safetensors") if safe else ("pytorch_model", ".bin")
    if size == 100:
        # 96 bytes of embedding, 64 and 16 of the middle: the tied head is with its owner
        assert names == [
            f"{stem}-00001-of-00002{suffix}",
            f"{stem}-00002-of-00002{suffix}",
            f"{stem}{suffix}.index.json",
        ]
        index = json.loads((place / names[2]).read_text())
        assert index["metadata"]["total_size"] == 176 + (0 if safe else 96)
        assert ("head.weight" in index["weight_map"]) is not safe
    else:
        assert names == [f"{stem}{suffix}"]
    read = {name: value.tolist() for name, value in read_weights(place).items()}
    assert {name: state[name] for name in read} == read


def _again(directory: str) -> None:
    for size in (40, 100, "1MB"):
        _save_model(directory, "accel", size, True)


def test_files_of_an_earlier_save_go(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other-00001-of-00002.safetensors").write_text("not ours")
    run_one(_again, str(tmp_path))
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"config.json", "model.safetensors", "other-00001-of-00002.safetensors"}


@pytest.mark.usefixtures("accelerate")
def test_accelerates_shards_are_read(tmp_path: Path) -> None:
    for safe in (True, False):
        place = tmp_path / str(safe)
        state = run_one(_save_model, str(place), "accelerate", 100, safe)
        assert len(list(place.glob("*-of-*"))) > 1
        read = read_weights(place)
        assert {name: value.tolist() for name, value in read.items()} == {name: state[name] for name in read}
        assert len(read) >= 3


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="not in its folder"):
        read_weights(tmp_path)


def test_an_index_opens_only_files_that_the_checkpoint_lists(tmp_path: Path) -> None:
    save_weights({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, 8, True)
    index, *names = sorted((path.name for path in tmp_path.iterdir()), reverse=True)
    assert sorted(read_weights(tmp_path, files=[index, *names])) == ["a", "b"]
    for missing in names:
        message = f"{tmp_path / index} names {missing}, which the checkpoint does not have"
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
            read_weights(tmp_path, files={index, *names} - {missing})


@pytest.mark.parametrize(
    ("size", "amount"), [("10GB", 10**10), ("5MiB", 5 << 20), ("1.5 kb", 1500), (7, 7), ("200B", 200)]
)
def test_sizes(size: Any, amount: int) -> None:
    assert size_in_bytes(size) == amount


@pytest.mark.parametrize("size", ["ten", "5", 0, -1, "5XB", None, True])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"max_shard_size={size!r}")):
        size_in_bytes(size)


def test_shards_hold_at_most_the_size_and_everything_once() -> None:
    state = {f"t{index}": torch.zeros(index) for index in (1, 50, 3, 4, 5, 6, 0)}
    parts = shards(state, 40)
    assert [name for part in parts for name in part] == list(state)
    for part in parts:
        assert sum(value.numel() * 4 for value in part.values()) <= 40 or len(part) == 1


def _objects(directory: str) -> list[Any]:
    project = ProjectConfiguration(project_dir=directory)
    accelerator = Accelerator(project_config=project)
    folder = Path(directory)
    accelerator.save({"a": torch.ones(2)}, folder / "a.safetensors", safe_serialization=True)
    accelerator.save({"path": Path("x"), "b": numpy.ones(2)}, folder / "any.pkl")
    save({"c": numpy.arange(3)}, folder / "c.pkl")
    with open(folder / "open.bin", "wb") as file:
        accelerator.save([1, 2], file)
    errors = []
    for value in ([1], {"a": 1}):
        try:
            accelerator.save(value, folder / "a.safetensors", safe_serialization=True)
        except ArgumentError as error:
            errors.append(str(error))
    return [load(folder / "c.pkl")["c"].tolist(), load(folder / "open.bin"), errors]


def test_single_objects(tmp_path: Path) -> None:
    read, opened, errors = run_one(_objects, str(tmp_path))
    assert (read, opened) == ([0, 1, 2], [1, 2])
    assert errors == ["save(safe_serialization=True) takes a dict of tensors"] * 2
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]
    assert torch.load(tmp_path / "any.pkl", weights_only=False)["path"] == Path("x")
    assert {entry.name for entry in tmp_path.iterdir()} == {"a.safetensors", "any.pkl", "c.pkl", "open.bin"}


def test_cleaning_keeps_parts_of_one_memory_that_are_not_the_same(caplog: pytest.LogCaptureFixture) -> None:
    memory = torch.arange(6.0)
    state = {"a": memory[:3], "b": memory[3:], "c": memory[:3], "d": memory.reshape(2, 3).t(), "e": "text"}
    with caplog.at_level("WARNING"):
        cleaned = clean_state_dict_for_safetensors(state)
    assert [record.getMessage() for record in caplog.records] == [
        "tied weights are saved under their first name only, without: c"
    ]
    assert list(cleaned) == ["a", "b", "d", "e"]
    assert cleaned["d"].is_contiguous()


class _Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"x": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


def _unsavable(directory: str, kind: str) -> None:
    accelerator = Accelerator()
    if kind == "meta":
        accelerator.save_model(nn.Linear(1, 1, device="meta"), directory)
    elif kind == "file":
        accelerator.save_model(nn.Linear(1, 1), __file__)
    else:
        accelerator.save_model(_Extra(1, 1), directory)


@pytest.mark.parametrize(
    ("kind", "said"), [("meta", "on the meta device"), ("file", "must be a directory"), ("extra", "_extra_state")]
)
def test_models_that_cannot_be_saved(tmp_path: Path, kind: str, said: str) -> None:
    ended = outcomes(_unsavable, str(tmp_path / "model"), kind, processes=1)[0]
    assert ended.error == "ArgumentError"
    assert said in ended.message


def _unsavable_on_one(directory: str) -> str:
    accelerator = Accelerator()
    model = (_Extra if accelerator.process_index else nn.Linear)(1, 1)
    try:
        accelerator.save_model(model, directory)
    except (ArgumentError, CheckpointError) as refused:
        return f"{type(refused).__name__}: {refused}"
    return ""


def test_what_one_process_cannot_save_is_refused_there(tmp_path: Path) -> None:
    """A model that is not sharded is saved without a word to the other processes."""
    first, second = run(_unsavable_on_one, str(tmp_path / "model"))
    assert first == ""
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert second.startswith("ArgumentError: save_model: _extra_state is a dict")


def _offloaded(directory: str) -> list[bool]:
    from accel.big_models import cpu_offload, disk_offload

    same = []
    ways: list[Any] = [cpu_offload, disk_offload]
    for number, offload in enumerate(ways):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        how: dict[str, Any] = {} if offload is cpu_offload else {"offload_dir": f"{directory}/offloaded"}
        offload(model, execution_device=torch.device("cpu"), **how)
        place = Path(directory) / str(number)
        Accelerator(cpu=True).save_model(model, place)
        read = read_weights(place)
        same.append(read.keys() == expected.keys() and all(torch.equal(read[name], expected[name]) for name in read))
    return same


def test_weights_that_hooks_have_moved_are_saved(tmp_path: Path) -> None:
    assert run_one(_offloaded, str(tmp_path)) == [True, True]
