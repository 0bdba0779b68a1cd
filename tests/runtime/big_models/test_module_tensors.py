from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_models import (
    check_device_same,
    check_tied_parameters_in_config,
    find_tied_parameters,
    get_non_persistent_buffers,
    id_tensor_storage,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accel.errors import ArgumentError
from tests.needs import missing
from tests.runtime.big_models.models import Layer, Tower

META = torch.device("meta")


def test_tensors_by_name() -> None:
    layer = Layer(2)
    own = [name for name, _ in named_module_tensors(layer)]
    assert own == ["scale", "shift"]
    every = [name for name, _ in named_module_tensors(layer, recurse=True, remove_non_persistent=True)]
    assert every == ["up.weight", "up.bias", "down.weight", "down.bias", "scale"]
    assert [name for name, _ in named_module_tensors(layer, include_buffers=False)] == []
    nested = nn.Sequential(layer)
    assert [name for name, _ in named_module_tensors(nested, recurse=True, remove_non_persistent=True)][-1] == "0.scale"


def test_buffers_that_are_not_saved() -> None:
    model = nn.Sequential(Layer(2))
    assert get_non_persistent_buffers(model) == set()
    assert get_non_persistent_buffers(model, recurse=True) == {"shift"}
    assert get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.shift"}
    assert get_non_persistent_buffers(model[0], recurse=True, fqns=True) == {"shift"}


def test_a_value_takes_the_type_that_is_there_or_the_one_asked_for() -> None:
    layer = nn.Linear(2, 2).half()
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2))
    assert layer.weight.dtype == torch.float16
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), dtype="bfloat16")
    assert (layer.weight.dtype, layer.weight.requires_grad) == (torch.bfloat16, True)
    model = nn.Sequential(nn.BatchNorm1d(2))
    count = torch.tensor(3)
    set_module_tensor_to_device(model, "0.num_batches_tracked", "cpu", value=count, dtype=torch.float16)
    assert model[0].num_batches_tracked.dtype == torch.int64
    assert int(model[0].num_batches_tracked) == 3  # type: ignore[arg-type]


def test_to_the_meta_device_and_back() -> None:
    layer = nn.Linear(2, 2)
    set_module_tensor_to_device(layer, "weight", "meta", dtype=torch.float16)
    assert (layer.weight.device, layer.weight.dtype) == (META, torch.float16)
    with pytest.raises(ArgumentError, match="weight is on the meta device and has no values"):
        set_module_tensor_to_device(layer, "weight", "cpu")
    set_module_tensor_to_device(layer, "weight", torch.device("cpu"), value=torch.ones(2, 2))
    assert layer.weight.dtype == torch.float16


def test_a_parameter_that_is_there_already_stays_the_same_object() -> None:
    layer = nn.Linear(2, 2)
    weight = layer.weight
    set_module_tensor_to_device(layer, "weight", "cpu")
    assert layer.weight is weight


def test_class_and_attributes_of_a_parameter_stay() -> None:
    class Special(nn.Parameter):
        pass

    layer = nn.Linear(2, 2)
    layer.weight = Special(torch.ones(2, 2), requires_grad=False)
    vars(layer.weight)["_is_hf_initialized"] = True
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(2, 2))
    assert type(layer.weight) is Special
    assert vars(layer.weight)["_is_hf_initialized"]
    assert not layer.weight.requires_grad


def test_a_class_that_quantises_when_it_is_moved_does_so() -> None:
    class Quantised(nn.Parameter):
        """As those of bitsandbytes: built from wide numbers, narrow after its first move."""

        def __new__(cls, data: torch.Tensor, requires_grad: bool = False, blocks: int = 1) -> Quantised:
            made = torch.Tensor._make_subclass(cls, data, requires_grad)
            made.blocks = blocks  # type: ignore[attr-defined]
            return made

        def to(self, *args: Any, **kwargs: Any) -> Quantised:
            return Quantised(self.data.round(), self.requires_grad, self.blocks)  # type: ignore[attr-defined]

    layer = nn.Linear(2, 2)
    layer.weight = Quantised(torch.zeros(2, 2), False, 4)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.full((2, 2), 1.7))
    assert isinstance(layer.weight, Quantised)
    assert layer.weight.tolist() == [[2, 2], [2, 2]]
    assert vars(layer.weight)["blocks"] == 4


def test_statistics_of_8_bit_weights() -> None:
    layer = nn.Linear(2, 2)
    scales = torch.ones(2, dtype=torch.float16)
    set_module_tensor_to_device(layer, "weight", "cpu", value=torch.ones(2, 2), fp16_statistics=scales)
    assert torch.equal(vars(layer.weight)["SCB"], scales)


def test_tied_weights_are_on_a_device_once() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    tied: dict[int, dict[torch.device, torch.Tensor]] = {first.weight.data_ptr(): {}}
    set_module_tensor_to_device(first, "weight", "meta", tied_params_map=tied)
    set_module_tensor_to_device(second, "weight", "meta", tied_params_map=tied)
    assert first.weight is second.weight
    value = torch.ones(2, 2)
    tied = {value.data_ptr(): {}}
    set_module_tensor_to_device(first, "weight", "cpu", value=value, tied_params_map=tied)
    set_module_tensor_to_device(second, "weight", "cpu", value=value, tied_params_map=tied)
    assert first.weight is second.weight


@pytest.mark.parametrize(
    ("name", "device", "value", "said"),
    [
        ("0.wieght", "cpu", None, "no parameter or buffer '0.wieght'; did you mean '0.weight'?"),
        ("1.weight", "cpu", None, "no parameter or buffer '1.weight'"),
        ("0.bias", "cpu", None, "0.bias of Sequential is registered as None"),
        ("0.weight", "cpu", torch.ones(3), "0.weight has shape (2, 2), but its new value has (3,)"),
        ("0.weight", "dsik", None, "device 'dsik' is unknown to torch"),
        ("0.weight", 0, None, "device 0: this machine has no accelerator"),
    ],
)
def test_mistakes_are_one_line(name: str, device: Any, value: torch.Tensor | None, said: str) -> None:
    if device == 0 and torch.accelerator.is_available():
        pytest.skip("there is an accelerator 0 here")
    with pytest.raises(ArgumentError) as caught:
        set_module_tensor_to_device(nn.Sequential(nn.Linear(2, 2, bias=False)), name, device, value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ties_are_found_and_mended() -> None:
    model = Tower()
    ties = find_tied_parameters(model)
    assert ties == [["embed.weight", "head.weight"]]
    model.head.weight = nn.Parameter(torch.zeros(11, 6, device="meta"))
    assert find_tied_parameters(model) == []
    retie_parameters(model, ties)
    assert model.head.weight is model.embed.weight
    for part in (model.embed, model.head):
        part.weight = nn.Parameter(torch.zeros(11, 6, device="meta"))
    retie_parameters(model, ties)
    assert model.head.weight is not model.embed.weight


def test_storages_and_devices() -> None:
    tensor = torch.ones(4)
    assert id_tensor_storage(tensor[1:]) == id_tensor_storage(tensor)
    assert id_tensor_storage(tensor) != id_tensor_storage(tensor.clone())
    assert check_device_same(torch.device("cuda"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cuda:1"), torch.device("cuda:0"))
    assert not check_device_same(torch.device("cpu"), META)


def test_ties_in_the_configuration_of_transformers_models() -> None:
    if find_spec("transformers") is None:
        missing("transformers", "pip install transformers")
    transformers: Any = import_module("transformers")
    shape = {"n_layer": 1, "n_head": 1, "n_embd": 4, "vocab_size": 8, "n_positions": 8}
    tied = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))
    loose = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, tie_word_embeddings=False))
    assert check_tied_parameters_in_config(tied)
    assert not check_tied_parameters_in_config(loose)
    assert not check_tied_parameters_in_config(Tower())
