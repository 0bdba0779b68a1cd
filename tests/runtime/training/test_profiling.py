"""`Accelerator.profile`: a trace a process, cycles, and what cannot be recorded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.accelerator.arguments import handlers_by_class, recipe_of
from accel.errors import ArgumentError
from accel.fp8_recipes import MSAMPRecipeKwargs
from accel.plugins import AutocastKwargs, GradScalerKwargs, ProfileKwargs

from ..worlds import run, run_one


def _traced(folder: str) -> list[str]:
    accelerator = Accelerator(kwargs_handlers=[ProfileKwargs(activities=["cpu"], output_trace_dir=folder)])
    with accelerator.profile() as profiler:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert "aten::mm" in [event.key for event in profiler.key_averages()]
    return sorted(os.listdir(folder))


def test_every_process_writes_its_trace_before_any_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    assert run(_traced, str(folder)) == [["profile_0.json", "profile_1.json"]] * 2
    names = [event.get("name") for event in json.loads((folder / "profile_1.json").read_text())["traceEvents"]]
    assert "aten::mm" in names


def _cycles() -> dict[str, Any]:
    ready: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: ready.append(profiler.step_num),
        record_shapes=True,
    )
    accelerator = Accelerator(cpu=True)
    with accelerator.profile(handler) as profiler:
        for _ in range(10):
            torch.ones(1) + 1
            profiler.step()
    return {"ready": ready, "own": accelerator.profile_handler}


def test_a_schedule_is_followed_and_the_call_comes_before_the_accelerators() -> None:
    assert run_one(_cycles) == {"ready": [4], "own": None}


def _failed(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True)
    try:
        with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)):
            raise ValueError("in the middle")
    except ValueError:
        return os.listdir(folder) if os.path.isdir(folder) else []


def test_an_error_passes_and_writes_nothing(tmp_path: Path) -> None:
    assert run_one(_failed, str(tmp_path / "traces")) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"activities": ["gpu"]}, "'gpu' is not one of cpu, xpu, mtia, cuda, hpu; did you mean"),
        ({"schedule_option": {"warmpu": 1}}, "'warmpu' is not one of .*; did you mean 'warmup'"),
    ],
)
def test_what_cannot_be_asked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        ProfileKwargs(**options)


def test_what_this_build_cannot_record() -> None:
    with pytest.raises(ArgumentError, match="this build of torch cannot record 'hpu', only"):
        ProfileKwargs(activities=["hpu"]).build()


def test_only_what_differs_from_the_defaults_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProfileKwargs(with_flops=True).to_kwargs() == {"with_flops": True}
    assert GradScalerKwargs().to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O1")
    assert MSAMPRecipeKwargs().opt_level == "O1"
    assert MSAMPRecipeKwargs().to_kwargs() == {"opt_level": "O1"}
    with pytest.raises(ArgumentError, match="opt_level: 'O3' is not one of O1, O2"):
        MSAMPRecipeKwargs("O3")


def test_handlers_are_sorted_by_what_they_are_for() -> None:
    profile, autocast = ProfileKwargs(), AutocastKwargs()
    assert handlers_by_class([profile, autocast]) == {ProfileKwargs: profile, AutocastKwargs: autocast}
    with pytest.raises(ArgumentError, match="kwargs_handlers: ProfileKwargs is given twice"):
        handlers_by_class([profile, profile])
    recipe = MSAMPRecipeKwargs()
    assert recipe_of(handlers_by_class([profile, recipe])) is recipe
    assert recipe_of({}) is None
