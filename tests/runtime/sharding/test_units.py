"""Which modules are gathered at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from accel.errors import ArgumentError
from accel.parallel.units import check_class_names, find_units, ignored_parameters, members_of, unit_of
from accel.plugins.fsdp import FullyShardedDataParallelPlugin

from .training import Block, Decoder


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    # The plugin sets it for transformers: monkeypatch takes that back.
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def _units(model: nn.Module, **how: Any) -> list[str]:
    return [name for name, _ in find_units(model, FullyShardedDataParallelPlugin(**how))]


BLOCKS = ["blocks.0", "blocks.1", "blocks.2", ""]


def test_the_model_s_own_classes_then_size_then_what_is_named() -> None:
    model = Decoder()
    assert _units(model) == BLOCKS
    assert _units(nn.Sequential(model)) == [f"0.{name}" for name in BLOCKS[:3]] + [""]
    bare = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert _units(bare) == [""]
    assert _units(bare, auto_wrap_policy="size_based_wrap", min_num_params=20) == ["0", "1", ""]
    assert _units(model, auto_wrap_policy="NO_WRAP") == [""]
    assert _units(bare, auto_wrap_policy="size_based_wrap", min_num_params=0) == [""]  # as Accelerate reads it
    assert _units(model, transformer_cls_names_to_wrap="LayerNorm, Block") == [
        "blocks.0.norm", "blocks.0", "blocks.1.norm", "blocks.1", "blocks.2.norm", "blocks.2", "norm", ""
    ]  # fmt: skip


def test_policies_of_torch_choose() -> None:
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

    model = Decoder()
    assert _units(model, auto_wrap_policy=ModuleWrapPolicy({Block})) == BLOCKS
    policy = partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module is model.blocks[1])
    assert _units(model, auto_wrap_policy=policy) == ["blocks.1", ""]


def test_a_class_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ArgumentError) as raised:
        check_class_names(FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap="T5Layer"), [Decoder()], set())
    assert str(raised.value) == (
        "Could not find the transformer layer class T5Layer in the prepared models, which have "
        "Block, Decoder, Embedding, LayerNorm, Linear, ModuleList"
    )
    with pytest.raises(ArgumentError, match="a Linear has no _no_split_modules: pass transformer_cls_names_to_wrap"):
        _units(nn.Linear(2, 2), auto_wrap_policy="transformer_based_wrap")


def test_modules_that_share_a_parameter_are_in_one_unit() -> None:
    classes = {"transformer_cls_names_to_wrap": ["Linear", "Embedding"]}
    assert _units(Decoder(tied=False), **classes)[-3:] == ["blocks.2.down", "head", ""]
    tied: Any = Decoder()
    found = _units(tied, **classes)
    assert ("embed" in found, "head" in found, found[0]) == (False, False, "blocks.0.up")
    # In a unit within another: the inner one goes.
    tied.blocks[1].up.bias = tied.blocks[1].norm.weight = nn.Parameter(torch.ones(16))
    assert _units(tied, transformer_cls_names_to_wrap=["Block", "LayerNorm"]) == [
        "blocks.0.norm", "blocks.0", "blocks.1", "blocks.2.norm", "blocks.2", "norm", ""
    ]  # fmt: skip
    # One module under two names.
    twice: Any = nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2)), "b": nn.Sequential()})
    twice["b"].append(twice["a"][0])
    assert _units(twice, transformer_cls_names_to_wrap=["Sequential"]) == [""]


def test_every_parameter_has_the_nearest_unit_around_it() -> None:
    model = Decoder()
    units = ["blocks.1", "blocks.1.norm", ""]
    assert unit_of("blocks.1.norm.weight", units) == "blocks.1.norm"
    assert unit_of("blocks.10.norm.weight", units) == ""
    names = {parameter: [name] for name, parameter in model.named_parameters()}
    ignored = ignored_parameters(model, r"blocks\.\d\.up")
    assert len(ignored) == 6
    members = members_of(units, names, ignored)
    assert [names[parameter][0] for parameter in members["blocks.1"]] == ["blocks.1.down.weight", "blocks.1.down.bias"]
    assert sum(map(len, members.values())) == len(names) - 6


def test_ignored_modules_are_found_by_their_whole_names() -> None:
    model = Decoder()
    assert ignored_parameters(model, [model.norm]) == {model.norm.weight, model.norm.bias}
    with pytest.raises(ArgumentError, match="ignored_modules='lock' matches no module of the Decoder"):
        ignored_parameters(model, "lock")
    with pytest.raises(ArgumentError, match="is not a regular expression: "):
        ignored_parameters(model, "(")
