"""Saving beside training: what is saved is what was at the call, and nobody misses how it ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel.checkpoint.background import Staging
from accel.checkpoint.manifest import find_damage
from accel.errors import CheckpointError

from ..small import fill, simple, value_of
from ..worlds import run, run_one


def _changed_after(directory: str) -> list[Any]:
    accelerator, model, optimizer, tally = simple()
    weights = {id(parameter) for parameter in model.parameters()}
    assert weights
    seen: list[Any] = []
    for value in (1.0, 2.0):
        fill(model, value)
        tally.value = [value]
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        fill(model, value)
        before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
        place = accelerator.save_state(directory, async_save=True)
        fill(model, -1.0)
        tally.value.append("later")
        optimizer.optimizer.state[next(iter(optimizer.optimizer.state))]["exp_avg"].zero_()
        accelerator.load_state(place)
        after = optimizer.state_dict()["state"][0]["exp_avg"]
        seen.append((value_of(model), tally.value, torch.equal(before, after), find_damage(Path(place))))
    return seen


@pytest.mark.parametrize("processes", [1, 2])
def test_what_is_saved_is_what_was_at_the_call(tmp_path: Path, processes: int) -> None:
    expected = [(1.0, [1.0], True, None), (2.0, [2.0], True, None)]
    assert run(_changed_after, str(tmp_path / "here"), processes=processes) == [expected] * processes


def _failing(directory: str, how: str) -> list[Any]:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=1)
    accelerator, model, _, _ = simple(project_config=project)
    fill(model, 1.0)
    accelerator.save_state()
    fill(model, 2.0)
    handle = accelerator.register_save_state_pre_hook(_in_the_way)
    accelerator.save_state(async_save=True)
    handle.remove()
    told: list[Any] = []
    ways: dict[str, Callable[[], Any]] = {
        "wait": accelerator.wait_for_checkpoint,
        "save": accelerator.save_state,
        "load": accelerator.load_state,
        "end": accelerator.end_training,
    }
    try:
        ways[how]()
    except CheckpointError as error:
        told.append(str(error))
    if how != "end":
        accelerator.load_state("latest")
        told.append(value_of(model))
        fill(model, 3.0)
        accelerator.save_state(async_save=True)
        accelerator.wait_for_checkpoint()
    return [*told, _visible(Path(directory) / "checkpoints")]


def _visible(folder: Path) -> list[str]:
    """Without the draft of a failed save, which its keeper may still be deleting."""
    return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))


def _in_the_way(models: Any, weights: Any, directory: str) -> None:
    """Something that is only found when the files are written: a directory where a file of process 1 should be."""
    (Path(directory) / "random_states_1.pkl").mkdir(exist_ok=True)


@pytest.mark.parametrize("how", ["wait", "save", "load", "end"])
def test_a_failure_beside_training_is_raised_on_every_process(tmp_path: Path, how: str) -> None:
    for told in run(_failing, str(tmp_path), how):
        assert told[0].startswith(f"saving {tmp_path}/checkpoints/checkpoint_1: process 1: FileExistsError")
        assert told[1:] == ([["checkpoint_0"]] if how == "end" else [1.0, ["checkpoint_1"]])


def test_the_interpreter_waits_for_it(tmp_path: Path) -> None:
    """Large enough for threads to be needed after the main one has ended."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "from accel import Accelerator\n"
        "accelerator = Accelerator()\n"
        "model = accelerator.prepare(torch.nn.Linear(2000, 3000))\n"
        "accelerator.save_state(sys.argv[1], async_save=True)\n"
    )
    ended = subprocess.run([sys.executable, script, tmp_path / "here"], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert find_damage(tmp_path / "here") is None
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def _automatic(directory: str) -> list[str]:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, _, _ = simple(project_config=project)
    for value in range(4):
        fill(model, float(value))
        accelerator.save_state(async_save=True)
    accelerator.end_training()
    return sorted(entry.name for entry in (Path(directory) / "checkpoints").iterdir())


def test_names_and_limit_hold_beside_training(tmp_path: Path) -> None:
    assert run(_automatic, str(tmp_path)) == [["checkpoint_2", "checkpoint_3"]] * 2


def _note(models: Any, weights: Any, directory: str) -> None:
    (Path(directory) / "a.txt").write_text("a")


def _hooks(directory: str) -> Any:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    accelerator.register_save_state_pre_hook(_note)
    accelerator.save_state(directory, async_save=True)
    accelerator.wait_for_checkpoint()
    del model
    return sorted(entry.name for entry in Path(directory).iterdir())


def test_hooks_write_before_it_returns(tmp_path: Path) -> None:
    names = ["a.txt", "accel_manifest.json", "model.safetensors", "random_states_0.pkl"]
    assert run_one(_hooks, str(tmp_path / "here")) == names


def test_copies_keep_ties_types_and_shapes() -> None:
    staging = Staging(torch.device("cpu"))
    tied = torch.arange(6.0).reshape(2, 3)
    module = nn.Linear(2, 2)
    state = module.state_dict()
    tree = {
        "tied": [tied, tied],
        "view": tied.t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": (None, 1, "x", {"flag": True}),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
        "state": state,
        "sparse": torch.eye(2).to_sparse(),
    }
    copied = staging.copy(tree)
    tied.zero_()
    assert copied["tied"][0] is copied["tied"][1]
    assert copied["tied"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copied["view"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copied["half"].dtype is torch.bfloat16
    assert copied["none"] == (None, 1, "x", {"flag": True})
    assert copied["none"][3] is not tree["none"][3]  # type: ignore[index]
    assert (copied["empty"].shape, copied["scalar"].item()) == ((0, 4), 2.5)
    assert type(copied["state"]) is type(state)
    assert copied["state"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert copied["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert copied["tied"][0].untyped_storage().nbytes() == 24  # not the whole of the memory it lies in
