"""Sizes, ties, device maps and files are those of Accelerate 1.15 (where that does not fail).

In processes of their own: in this one `accelerate` may be `accel.compat`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel.big_models import (
    OffloadedWeightsLoader,
    calculate_maximum_sizes,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    dtype_byte_size,
    estimate_training_usage,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    infer_auto_device_map,
    offload_state_dict,
)
from tests.needs import missing, package
from tests.runtime.big_models.trees import trees
from tests.runtime.worlds import run_one

package("hypothesis")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

many = settings(deadline=None, suppress_health_check=list(HealthCheck))
amounts = st.integers(0, 1500)
budgets = st.fixed_dictionaries({0: amounts, "cpu": amounts}, optional={1: amounts, 2: amounts})
classes = st.lists(st.sampled_from(["Left", "Right", "Tall", "Linear"]), max_size=2, unique=True)
dtypes = st.sampled_from([None, "float16", "bfloat16", "float64"])


def accelerate(module: str) -> Any:
    """The module of Accelerate itself."""
    found = import_module(f"accelerate.{module}")
    assert found.__file__ is not None
    assert Path(found.__file__).parent.name == "utils"
    return found


@given(trees(), dtypes)
@many
def sizes_agree(model: nn.Module, dtype: str | None) -> None:
    theirs = accelerate("utils.modeling")
    assert compute_module_sizes(model, dtype=dtype) == theirs.compute_module_sizes(model, dtype=dtype)
    ours = compute_module_sizes(model, buffers_only=True)
    assert ours == theirs.compute_module_sizes(model, buffers_only=True)


@given(trees(), classes)
@many
def largest_layers_agree(model: nn.Module, no_split: list[str]) -> None:
    theirs = accelerate("utils.modeling")
    known = compute_module_sizes(model)
    children: list[Any] = list(model.named_children())
    assert get_max_layer_size(children, known, no_split) == theirs.get_max_layer_size(children, known, no_split)
    assert calculate_maximum_sizes(model) == theirs.calculate_maximum_sizes(model)


@given(trees())
@many
def ties_agree(model: nn.Module) -> None:
    theirs = accelerate("utils.modeling")
    assert sorted(find_tied_parameters(model)) == sorted(theirs.find_tied_parameters(model))


@given(trees(), budgets, classes, dtypes, st.booleans(), st.booleans())
@many
def device_maps_agree(
    model: nn.Module, budget: dict[Any, Any], no_split: list[str], dtype: str | None, clean: bool, look_ahead: bool
) -> None:
    theirs = accelerate("utils.modeling")
    how: dict[str, Any] = {
        "no_split_module_classes": no_split,
        "dtype": dtype,
        "clean_result": clean,
        "fallback_allocation": look_ahead,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of buffers that fit nowhere
        ours = infer_auto_device_map(model, dict(budget), **how)
        check_device_map(model, ours)
        try:
            expected = theirs.infer_auto_device_map(model, dict(budget), **how)
        except (IndexError, KeyError, TypeError):
            return
    assert ours == expected


@given(trees(), budgets, st.booleans(), dtypes)
@many
def balanced_memories_agree(model: nn.Module, budget: dict[Any, Any], low_zero: bool, dtype: str | None) -> None:
    theirs = accelerate("utils.modeling")
    try:
        expected = theirs.get_balanced_memory(model, dict(budget), low_zero=low_zero, dtype=dtype)
    except KeyError:  # accelerators that are not numbered 0, 1, 2, …
        return
    assert get_balanced_memory(model, dict(budget), low_zero=low_zero, dtype=dtype) == expected


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(".".join)


@given(st.dictionaries(names, st.sampled_from([0, 1, "cpu"]), max_size=8))
@many
def clean_maps_agree(device_map: dict[str, Any]) -> None:
    theirs = accelerate("utils.modeling")
    nested = any(other.startswith(f"{name}.") for name in device_map for other in device_map)
    if not nested:
        assert clean_device_map(dict(device_map)) == theirs.clean_device_map(dict(device_map))


def sizes_of_types_agree() -> None:
    kinds = accelerate("utils.dataclasses").CustomDtype
    assert [dtype_byte_size(kind) for kind in kinds] == [1, 0.5, 0.25]
    theirs = accelerate("utils.modeling")
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8):
        assert dtype_byte_size(dtype) == theirs.dtype_byte_size(dtype)


def estimates_agree() -> None:
    theirs = import_module("accelerate.commands.estimate")
    for precision in ("float32", "float16", "bfloat16", "fp8"):
        assert estimate_training_usage(12_345, precision) == theirs.estimate_training_usage(12_345, precision)


def files_agree(folder: Path) -> None:
    theirs = accelerate("utils.offload")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e5m2):
        state = {"w": torch.rand(3, 2).to(dtype), "s": torch.ones(()).to(dtype)}
        ours, others = folder / f"ours {dtype}", folder / f"theirs {dtype}"
        offload_state_dict(ours, state)
        theirs.offload_state_dict(others, state)
        assert json.loads((ours / "index.json").read_text()) == json.loads((others / "index.json").read_text())
        read, back = theirs.OffloadedWeightsLoader(save_folder=ours), OffloadedWeightsLoader(save_folder=others)
        for name, value in state.items():
            assert torch.equal(read[name].float(), value.float())
            assert torch.equal(back[name].float(), value.float())


CHECKS: list[Callable[[], None]] = [
    sizes_agree,
    largest_layers_agree,
    ties_agree,
    device_maps_agree,
    balanced_memories_agree,
    clean_maps_agree,
    sizes_of_types_agree,
    estimates_agree,
]


def run_check(name: str) -> None:
    (check,) = (check for check in CHECKS if check.__name__ == name)
    check()


@pytest.fixture(autouse=True)
def _installed() -> None:
    if find_spec("accelerate") is None:
        missing("accelerate", "pip install accelerate==1.15.0")


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_what_is_computed(name: str) -> None:
    run_one(run_check, name)


def test_what_is_written(tmp_path: Path) -> None:
    run_one(files_agree, tmp_path)
