from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import Accelerator
from accel.big_models import (
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_offloaded_weights,
    load_state_dict,
    offload_state_dict,
)
from accel.errors import AccelError, ArgumentError, CheckpointError
from tests.runtime.big_models.models import Tower, addresses, scores, tower
from tests.runtime.worlds import run

META = torch.device("meta")
SHARDS = ("layers", "")


def saved(folder: Path, kind: str, dtype: torch.dtype | None = None) -> Path:
    """A checkpoint of `tower()`, without the second name of the tied weight; returns what to load."""
    model = tower() if dtype is None else tower().to(dtype)
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    if kind == "safetensors":
        save_file(state, folder / "model.safetensors")
        return folder
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
        return folder / "pytorch_model.bin"
    if kind == "old":
        torch.save(state, folder / "weights.pt", _use_new_zipfile_serialization=False)
        return folder / "weights.pt"
    suffix, write = ("safetensors", save_file) if kind == "sharded" else ("bin", torch.save)
    file_of: dict[str, str] = {}
    for number, shard in enumerate(SHARDS, start=1):
        name = f"model-0000{number}-of-00002.{suffix}"
        part = {key: value for key, value in state.items() if key.startswith("layers") == (shard == "layers")}
        write(part, folder / name)
        file_of |= dict.fromkeys(part, name)
    index = folder / f"model.{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_of}))
    return folder if kind == "sharded" else index


def empty(**shape: Any) -> Tower:
    with init_empty_weights():
        return Tower(**shape).eval()


KINDS = ["safetensors", "bin", "old", "sharded", "sharded bin"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", ["empty", "full"])
def test_every_format_into_empty_and_full_models(tmp_path: Path, kind: str, start: str) -> None:
    checkpoint = saved(tmp_path, kind)
    model = empty() if start == "empty" else tower(seed=5)
    load_checkpoint_in_model(model, checkpoint, strict=True)
    with torch.no_grad():
        for layer, source in zip(model.layers, tower().layers, strict=True):
            layer.shift.copy_(source.shift)  # type: ignore[operator, arg-type]
    assert model.head.weight is model.embed.weight
    assert torch.equal(scores(model), scores(tower()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffers", [False, True])
def test_every_format_over_host_and_disk(tmp_path: Path, kind: str, buffers: bool) -> None:
    checkpoint = saved(tmp_path, kind)
    device_map: dict[str, Any] = {"gain": "disk", "embed": "disk", "head": "disk", "norm": "disk", "layers": "cpu"}
    folder = tmp_path / "offloaded"
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, device_map, offload_folder=folder, offload_buffers=buffers, strict=True
    )
    assert addresses(model)["embed.weight"] == META
    state, expected = get_state_dict_offloaded_model(model), tower().state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    with torch.no_grad():
        for layer, source in zip(model.layers, tower().layers, strict=True):  # type: ignore[arg-type]
            layer.shift.copy_(source.shift)
    assert torch.equal(scores(model), scores(tower()))
    written = [path.name for path in folder.iterdir() if path.suffix == ".dat"]
    assert bool(written) is (kind in ("bin", "old", "sharded bin"))


def test_another_type_is_converted_once_and_written(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "safetensors")
    device_map: dict[str, Any] = {"layers": "disk", "": "cpu"}
    model = empty()
    load_checkpoint_in_model(
        model, checkpoint, device_map, offload_folder=tmp_path / "off", dtype="float16", keep_in_fp32_modules=["down"]
    )
    types = {name: param.dtype for name, param in model.named_parameters()}
    assert types["embed.weight"] == types["layers.0.up.weight"] == torch.float16
    assert types["layers.0.down.weight"] == torch.float32
    assert model.norm.num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]
    assert (tmp_path / "off/layers.0.up.weight.dat").is_file()
    assert not (tmp_path / "off/layers.0.down.weight.dat").exists()


def test_weights_take_the_type_of_the_model(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "safetensors", torch.float64)
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, {"layers": "disk", "": "cpu"}, offload_folder=tmp_path / "o"
    )
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_maps_that_are_made(tmp_path: Path, strategy: str) -> None:
    checkpoint = saved(tmp_path, "safetensors")
    memory: dict[int | str, int | str] = {"cpu": 1500, "disk": "1GB"}
    model = load_checkpoint_and_dispatch(
        empty(), checkpoint, strategy, max_memory=memory, offload_folder=tmp_path / "o"
    )
    found: Any = model.hf_device_map
    assert set(found.values()) == {"cpu", "disk"}
    scores(model)


def test_a_checkpoint_may_be_replaced_after_it_was_loaded_to_the_host(tmp_path: Path) -> None:
    for kind in ("safetensors", "bin"):
        checkpoint = saved(tmp_path, kind)
        model = empty()
        load_checkpoint_in_model(model, checkpoint)
        file = next(path for path in tmp_path.iterdir() if path.is_file())
        file.write_bytes(b"\0" * file.stat().st_size)
        assert torch.equal(model.embed.weight, tower().embed.weight)
        file.unlink()


def test_the_tied_name_that_is_in_the_file_is_the_one_that_counts(tmp_path: Path) -> None:
    state = {name: value for name, value in tower().state_dict().items() if name != "embed.weight"}
    save_file(state, tmp_path / "model.safetensors")
    for model in (tower(seed=3), empty()):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"}, strict=True)
        assert model.embed.weight is model.head.weight
        assert torch.equal(model.embed.weight, tower().embed.weight)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_tie_between_disk_and_host_has_its_numbers_on_both(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = saved(tmp_path, kind)
    device_map: dict[str, Any] = {"embed": "disk", "": "cpu"}
    model = load_checkpoint_and_dispatch(empty(), checkpoint, device_map, offload_folder=tmp_path / "o")
    assert "on different devices" in caplog.text
    state, expected = get_state_dict_offloaded_model(model), tower().state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_what_accel_saves_it_loads(tmp_path: Path) -> None:
    Accelerator().save_model(tower(), tmp_path) if hasattr(Accelerator, "save_model") else save_file(
        {k: v for k, v in tower().state_dict().items() if k != "head.weight"}, tmp_path / "model.safetensors"
    )
    model = empty()
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert torch.equal(model.head.weight, tower().head.weight)


def test_load_state_dict(tmp_path: Path) -> None:
    saved(tmp_path, "safetensors")
    state = load_state_dict(tmp_path / "model.safetensors", {"layers": "meta", "embed": "disk"})
    assert state["layers.0.up.weight"].device == META
    assert state["embed.weight"].device.type == "cpu"
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(state["embed.weight"], tower().embed.weight)


def test_weights_offloaded_by_name_are_put_back(tmp_path: Path) -> None:
    model, state = empty(), tower().state_dict()
    offload_state_dict(tmp_path, state)
    load_offloaded_weights(model, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    load_offloaded_weights(model, {}, tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_missing_and_unexpected_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {name: value for name, value in tower().state_dict().items() if name not in ("head.weight", "norm.bias")}
    save_file({**state, "norm.bais": torch.ones(1)}, tmp_path / "model.safetensors")
    model = tower(seed=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(model, tmp_path, strict=True)
    said = str(caught.value)
    assert said.endswith("lacks norm.bias; it holds norm.bais, which Tower lacks; did you mean 'norm.bias'?")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, tmp_path)
    assert "lacks norm.bias; it holds norm.bais" in caplog.text
    assert torch.equal(model.gain, tower().gain)


def damaged(folder: Path, how: str) -> tuple[Path, str]:
    """A checkpoint with one thing wrong, and what is to be said of it."""
    checkpoint = saved(folder, "sharded")
    second = folder / "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    if how == "missing shard":
        second.unlink()
        return checkpoint, "names model-00002-of-00002.safetensors, missing in"
    if how == "short shard":
        second.write_bytes(second.read_bytes()[:-7])
        return checkpoint, "is truncated: 7 bytes are missing at its end"
    if how == "no shard":
        second.write_bytes(b"not what it seems")
        return checkpoint, "is not a safetensors file, or is truncated"
    if how == "damaged header":
        data = bytearray(second.read_bytes())
        data[8] = 0xFF
        second.write_bytes(data)
        return checkpoint, "its header is damaged"
    if how == "lacking shard":
        save_file({"norm.bias": torch.ones(6)}, second)
        return checkpoint, "which the index lists for it"
    if how == "no index":
        index.write_text("[1, 2]")
        return checkpoint, "is not a checkpoint index"
    if how in ("upward", "absolute", "a number"):
        outside = folder.with_name(f"{folder.name}-outside.safetensors")
        save_file({"gain": torch.ones(6)}, outside)  # there, and good
        name = {"upward": f"../{outside.name}", "absolute": str(outside), "a number": 5}[how]
        index.write_text(json.dumps({"weight_map": {"gain": name}}))
        return checkpoint, "is not a checkpoint index" if how == "a number" else f"names {name!r}, which is not in"
    if how == "nothing":
        return folder / "nowhere", "does not exist"
    if how == "empty folder":
        (folder / "empty").mkdir()
        return folder / "empty", "holds none of model.safetensors, pytorch_model.bin and no *.index.json"
    if how == "two indexes":
        index.rename(folder / "a.index.json")
        (folder / "b.index.json").write_text("{}")
        return checkpoint, "holds several indexes: pass one of a.index.json, b.index.json"
    if how == "other names":
        save_file({"model.gain": torch.ones(6)}, folder / "model.safetensors")
        return checkpoint, "shares no name with Tower: it holds model.gain; the model has gain"
    if how == "other shape":
        save_file({"gain": torch.ones(7)}, folder / "model.safetensors")
        return checkpoint, "gain has shape (7,), but (6,) in Tower"
    if how == "other library":
        save_file({"gain": torch.ones(6)}, folder / "model.safetensors", metadata={"format": "tf"})
        return checkpoint, "was saved by 'tf'"
    if how == "code":
        torch.save({"gain": torch.ones(6), "code": nn.Linear}, folder / "weights.bin")
        return folder / "weights.bin", "cannot be loaded as weights only"
    if how == "no tensors":
        torch.save({"gain": torch.ones(6), "epoch": 3}, folder / "weights.bin")
        return folder / "weights.bin", "holds more than tensors (epoch)"
    assert how == "no pickle"
    (folder / "weights.bin").write_bytes(b"junk")
    return folder / "weights.bin", "cannot be loaded as weights only"


HOW = (
    "missing shard,short shard,no shard,damaged header,lacking shard,no index,upward,absolute,a number,"
    "nothing,empty folder,two indexes,"
    "other names,other shape,other library,code,no tensors,no pickle"
).split(",")


@pytest.mark.parametrize("how", HOW)
def test_what_is_wrong_with_a_checkpoint_is_one_line(tmp_path: Path, how: str) -> None:
    checkpoint, expected = damaged(tmp_path, how)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint_in_model(empty(), checkpoint)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device_map": {"": "disk"}}, "pass offload_folder for"),
        ({"device_map": {"layers": "cpu"}}, "has no device for"),
        ({"dtype": "flot16"}, "'flot16' is unknown to torch"),
        ({"broadcast_from_rank0": True}, "needs a process group"),
        ({"broadcast_from_rank0": True, "device_map": {"": "cpu"}}, "cannot be combined with broadcast_from_rank0"),
    ],
)
def test_arguments_that_cannot_be_followed(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    checkpoint = saved(tmp_path, "safetensors")
    with pytest.raises(AccelError) as caught:
        load_checkpoint_in_model(empty(), checkpoint, **arguments)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_strategy_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"device_map: 'blanced' is not one of auto.*did you mean 'balanced'"):
        load_checkpoint_and_dispatch(empty(), tmp_path, "blanced")


def load_from_first(checkpoint: str, strict: bool) -> list[float]:
    accelerator = Accelerator()
    model = tower(seed=accelerator.process_index + 10)
    source = checkpoint if accelerator.is_main_process else "not on this process"
    try:
        load_checkpoint_in_model(model, source, broadcast_from_rank0=True, strict=strict)
    except CheckpointError as error:
        return [float(len(str(error)))]
    return [float(value.double().sum()) for value in model.state_dict().values()]


def load_sharded(checkpoint: str, from_first: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    Accelerator()
    model = tower(seed=7)
    fully_shard(model)
    load_checkpoint_in_model(model, checkpoint, strict=True, broadcast_from_rank0=from_first)
    found = []
    for value in model.state_dict().values():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.append(float(whole.double().sum()))
    return found


@pytest.mark.parametrize("from_first", [False, True])
def test_a_model_with_sharded_parameters(tmp_path: Path, from_first: bool) -> None:
    saved(tmp_path, "sharded")
    expected = [float(value.double().sum()) for value in tower().state_dict().values()]
    for found in run(load_sharded, str(tmp_path), from_first):
        assert found == pytest.approx(expected)


def test_one_process_reads_for_all(tmp_path: Path) -> None:
    saved(tmp_path, "sharded")
    expected = [float(value.double().sum()) for value in tower().state_dict().values()]
    assert run(load_from_first, str(tmp_path), True) == [expected, expected]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    first, second = run(load_from_first, str(tmp_path), True)
    assert first == second
    assert len(first) == 1
