from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_models import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    find_tied_parameters,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
    init_empty_weights,
    remove_hook_from_module,
)
from accel.errors import ArgumentError, CheckpointError, StateError
from tests.runtime.big_models.models import TOKENS, Tower, addresses, scores, tower, twin

META = torch.device("meta")

SPREAD: dict[str, Any] = {
    "gain": "disk",
    "embed": "cpu",
    "layers.0": "disk",
    "layers.1": "cpu",
    "layers.2.up": "disk",
    "layers.2.down": "cpu",
    "layers.2.scale": "cpu",
    "norm": "disk",
    "head": "cpu",
}


@pytest.mark.parametrize("buffers", [False, True])
def test_host_and_disk_give_the_same_bit_for_bit(tmp_path: Path, buffers: bool) -> None:
    model = tower()
    plain = scores(model)
    assert dispatch_model(model, SPREAD, offload_dir=tmp_path, offload_buffers=buffers) is model
    assert addresses(model)["layers.0.up.weight"] == META
    assert addresses(model)["layers.1.up.weight"].type == "cpu"
    assert (addresses(model)["norm.running_mean"] == META) is buffers
    for _ in range(2):
        assert torch.equal(scores(model), plain)
    assert model.hf_device_map == SPREAD
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cpu", "layers.1": "disk", "gain": "disk"},
        {"": "disk", "layers.1.up": "cpu"},
        {"layers": "disk", "layers.1": "cpu", "layers.1.up.weight": "disk", "": "cpu"},
    ],
)
def test_an_entry_inside_another_overrides_it(tmp_path: Path, device_map: dict[str, Any]) -> None:
    model = tower()
    plain = scores(model)
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(scores(model), plain)
    on_disk = addresses(model)["layers.1.down.weight"] == META
    assert on_disk is (device_map.get("layers.1", device_map[""]) == "disk")
    assert addresses(model)["layers.1.up.bias"].type == ("meta" if "layers.1" in device_map and on_disk else "cpu")


def test_a_model_trains_again_when_its_hooks_are_off(tmp_path: Path) -> None:
    model = tower()
    plain, at = scores(model), addresses(model)
    dispatch_model(model, SPREAD, offload_dir=tmp_path)
    remove_hook_from_module(model, recurse=True)
    assert addresses(model) == at
    assert torch.equal(scores(model), plain)
    model.to(torch.float64)
    model(TOKENS)["scores"].sum().backward()
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]


def test_a_host_that_waits_for_another_device() -> None:
    """With the meta device as the one that computes, the host's part is offloaded as it is beside an accelerator."""
    model = tower()
    device_map: dict[str, Any] = {"gain": "meta", "embed": "meta", "layers": "cpu", "norm": "meta", "head": "meta"}
    dispatch_model(model, device_map)
    assert addresses(model)["layers.0.up.weight"] == META
    assert has_offloaded_params(model.get_submodule("layers.0.up"))
    assert not has_offloaded_params(model.norm)
    # The output is on the device of the input, as values that the meta device does not have: nothing to compare.
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        scores(model)


def test_the_host_by_its_other_names() -> None:
    model = dispatch_model(tower(), {"": torch.device("cpu"), "gain": "cpu"})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    dispatch_model(model, {"": "cpu"}, main_device=torch.device("cpu"), force_hooks=True)
    assert {device.type for device in addresses(model).values()} == {"cpu"}


def test_one_device_needs_no_hooks() -> None:
    model = tower()
    dispatch_model(model, {"": "cpu"})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert model.hf_device_map == {"": "cpu"}
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert all(hasattr(module, "_hf_hook") for module in model.modules() if list(module.parameters()))
    assert torch.equal(scores(model), scores(tower()))


def test_the_whole_model_on_disk(tmp_path: Path) -> None:
    model = tower()
    plain = scores(model)
    dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert {device for name, device in addresses(model).items() if name in dict(model.named_parameters())} == {META}
    assert torch.equal(scores(model), plain)


@pytest.mark.parametrize("preload", [None, ["Layer"]])
def test_cpu_offload_and_back(preload: list[str] | None) -> None:
    model = tower()
    plain, at = scores(model), addresses(model)
    assert cpu_offload(model, preload_module_classes=preload) is model
    assert addresses(model)["gain"] == META
    assert torch.equal(scores(model), plain)
    remove_hook_from_module(model, recurse=True)
    assert addresses(model) == at
    assert torch.equal(scores(model), plain)
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]


@pytest.mark.parametrize("buffers", [False, True])
def test_disk_offload_and_back(tmp_path: Path, buffers: bool) -> None:
    model = tower()
    plain = scores(model)
    disk_offload(model, tmp_path, offload_buffers=buffers)
    assert torch.equal(scores(model), plain)
    assert os.stat(tmp_path / "embed.weight.dat").st_ino == os.stat(tmp_path / "head.weight.dat").st_ino
    remove_hook_from_module(model, recurse=True)
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    assert torch.equal(scores(model), plain)
    assert find_tied_parameters(model) == [["embed.weight", "head.weight"]]


def test_weights_that_another_model_left_in_the_folder_are_not_used(tmp_path: Path) -> None:
    disk_offload(tower(seed=1), tmp_path)
    model = tower(seed=2)
    plain = scores(model)
    disk_offload(model, tmp_path)
    assert torch.equal(scores(model), plain)


def no_accelerator() -> bool:
    return not torch.accelerator.is_available()


def test_an_empty_model_runs_on_weights_that_are_there(tmp_path: Path) -> None:
    disk_offload(tower(), tmp_path, offload_buffers=True)
    with init_empty_weights():
        model = Tower().eval()
    for source, target in zip(tower().buffers(), model.buffers(), strict=True):
        target.copy_(source)
    disk_offload(model, tmp_path, execution_device=None if no_accelerator() else "cpu", offload_buffers=True)
    assert torch.equal(scores(model), scores(tower()))
    with init_empty_weights():
        other = Tower(depth=4)
    with pytest.raises(CheckpointError, match=r"lacks layers\.3\.up\.weight.*load the weights first"):
        disk_offload(other, tmp_path)


def test_nothing_to_offload(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="ReLU has no parameters: nothing to offload"):
        cpu_offload(nn.ReLU())
    with pytest.raises(ArgumentError, match="ReLU has no parameters: nothing to offload"):
        disk_offload(nn.ReLU(), tmp_path)


def test_a_spread_model_is_not_moved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = dispatch_model(tower(), SPREAD, offload_dir=tmp_path)
    with pytest.raises(StateError, match="remove its hooks first"):
        model.to("cpu")
    assert "should not be moved" in caplog.text
    remove_hook_from_module(model, recurse=True)
    assert model.to("cpu") is model


def test_a_copy_of_a_spread_model_stands_alone(tmp_path: Path) -> None:
    model = dispatch_model(tower(), SPREAD, offload_dir=tmp_path)
    plain = scores(model)
    other = twin(model)
    assert torch.equal(scores(other), plain)
    remove_hook_from_module(other, recurse=True)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    assert torch.equal(scores(model), plain)
    spread = dispatch_model(tower(), {"": "cpu"}, force_hooks=True)
    double = twin(spread)
    double.to(torch.float64)
    assert {param.dtype for param in double.parameters()} == {torch.float64}
    assert {param.dtype for param in spread.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"layers.0": None}, {}, "has no device for layers.0.scale"),
        ({}, {"offload_dir": None}, "gain, layers.0, layers.2.up, norm on 'disk': pass offload_dir"),
        ({"embed": "dsik", "head": "dsik"}, {}, "device 'dsik' is unknown to torch"),
    ],
)
def test_maps_that_cannot_be_followed(tmp_path: Path, change: Any, more: Any, said: str) -> None:
    device_map = {name: device for name, device in {**SPREAD, **change}.items() if device is not None}
    with pytest.raises(ArgumentError) as caught:
        dispatch_model(tower(), device_map, **{"offload_dir": tmp_path, **more})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_whole_state_of_an_offloaded_model(tmp_path: Path) -> None:
    model = tower()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    dispatch_model(model, SPREAD, offload_dir=tmp_path)
    found = get_state_dict_offloaded_model(model)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    other = cpu_offload(tower(), preload_module_classes=["Layer"])
    found = get_state_dict_offloaded_model(other)
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert addresses(other)["layers.0.up.weight"] == META


def test_state_without_numbers_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    found = get_state_dict_offloaded_model(model)
    assert set(found) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert "have no values: 0.weight, 0.bias, 1.weight, 1.bias" in caplog.text


def test_part_of_the_state_of_an_offloaded_model(tmp_path: Path) -> None:
    model = dispatch_model(tower(), SPREAD, offload_dir=tmp_path)
    empty: dict[str, Any] = {"layers.0.up.weight": "", "layers.0.up.bias": "", "gain": ""}
    found = get_state_dict_from_offload(model.get_submodule("layers.0.up"), "layers.0.up.weight", empty)
    assert torch.equal(found["layers.0.up.weight"], tower().state_dict()["layers.0.up.weight"])
    assert found["gain"] == ""
