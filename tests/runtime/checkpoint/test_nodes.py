"""Nodes without a common file system: each keeps a whole copy, and what copies them away may be cut off at any file."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accel import ProjectConfiguration
from accel.checkpoint.manifest import find_damage
from accel.errors import ArgumentError
from tests.needs import missing

from ..small import fill, simple, value_of
from ..worlds import outcomes, run

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS
AUTOMATIC = {"project_dir": "run", "automatic_checkpoint_naming": True}


def disk(directory: str) -> Path:
    return Path(directory) / f"disk-{os.environ.get('RANK', '0')}"


def node(directory: str, **how: Any) -> Any:
    """This process as the only one of its node, with a disk of its own."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ.get("RANK", "0")}
    os.environ["ACCEL_PROJECT_ROOT"] = str(disk(directory))
    return simple(project_config=ProjectConfiguration(**{**AUTOMATIC, **how}))


def saved(directory: str, *values: float) -> None:
    """Saves a checkpoint of each value; the script's own object differs from node to node."""
    accelerator, model, _, tally = node(directory)
    for value in values:
        fill(model, value)
        tally.value = [value, accelerator.process_index]
        accelerator.save_state()


def loaded(directory: str) -> Any:
    accelerator, model, _, tally = node(directory)
    accelerator.load_state("latest")
    return value_of(model), tally.value, accelerator.save_iteration


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def sent(directory: Path, names: set[str] | None = None) -> None:
    """What is on the disks, or so much of it, goes to the common place, and from there to new disks."""
    common = directory / "common"
    disks = sorted(directory.glob("disk-*"))
    for each in disks:
        for name in sorted(files(each)) if names is None else sorted(files(each) & names):
            (common / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(each / name, common / name)
    for each in disks:
        shutil.rmtree(each)
        shutil.copytree(common, each)


def test_files_of_two_nodes_have_no_name_in_common(tmp_path: Path) -> None:
    run(saved, str(tmp_path), 1.0, 2.0)
    first, second = files(tmp_path / "disk-0"), files(tmp_path / "disk-1")
    assert not first & second
    assert "run/checkpoints/checkpoint_1/model.safetensors" in first
    assert "node-1/run/checkpoints/checkpoint_1/model.safetensors" in second
    sent(tmp_path)
    assert run(loaded, str(tmp_path)) == [(2.0, [2.0, 0], 2), (2.0, [2.0, 1], 2)]


def cut_off(directory: str, seed: int) -> list[Any]:
    """Load, and save and load again, after any part of the files of the newest checkpoint has arrived."""
    accelerator, model, _, tally = node(directory)
    letters, seen = random.Random(seed), []
    place = Path(directory)
    for value in (1.0, 2.0):
        fill(model, value)
        tally.value = [value, accelerator.process_index]
        accelerator.save_state()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for each in ("disk-0", "disk-1"):
            shutil.copytree(place / each, place / "kept" / each)
    accelerator.wait_for_everyone()
    everything = sorted(name for each in ("disk-0", "disk-1") for name in files(place / "kept" / each))
    newest = [name for name in everything if "checkpoint_1" in name]
    for count in (0, 1, len(newest) - 1, len(newest), *letters.sample(range(2, len(newest) - 1), 4)):
        arrived = set(letters.sample(newest, count))
        if accelerator.is_main_process:
            for each in ("common", "disk-0", "disk-1"):
                shutil.rmtree(place / each, ignore_errors=True)
            for each in ("disk-0", "disk-1"):
                shutil.copytree(place / "kept" / each, place / each)
            sent(place, arrived | {name for name in everything if "checkpoint_1" not in name})
        accelerator.wait_for_everyone()
        accelerator.load_state("latest")
        seen.append((count, value_of(model), tally.value, accelerator.save_iteration))
        fill(model, 3.0)
        accelerator.save_state()  # in the place of the one that was passed over
        fill(model, 0.0)
        accelerator.load_state("latest")
        assert value_of(model) == 3.0
    return [len(newest), seen]


def test_a_newest_one_that_has_arrived_in_part_is_passed_over(tmp_path: Path) -> None:
    for rank, (count, seen) in enumerate(run(cut_off, str(tmp_path), 7)):
        assert count > 8
        for arrived, value, tally, number in seen:
            expected = 2.0 if arrived == count else 1.0
            assert (value, tally, number) == (expected, [expected, rank], int(expected)), seen


def test_copies_of_two_saves_are_not_one_checkpoint(tmp_path: Path) -> None:
    """Number 1 of an earlier start on one node, and of a later one on the other."""
    run(saved, str(tmp_path), 1.0, 2.0)
    earlier = tmp_path / "earlier"
    shutil.copytree(tmp_path / "disk-0/run/checkpoints/checkpoint_1", earlier)
    for each in (tmp_path / "disk-0/run", tmp_path / "disk-1/node-1/run"):
        shutil.rmtree(each / "checkpoints/checkpoint_1")
    run(resumed, str(tmp_path))
    place = tmp_path / "disk-0/run/checkpoints/checkpoint_1"
    shutil.rmtree(place)
    shutil.copytree(earlier, place)
    assert find_damage(place) is None
    assert run(loaded, str(tmp_path)) == [(1.0, [1.0, 0], 1), (1.0, [1.0, 1], 1)]


def resumed(directory: str) -> None:
    accelerator, _, _, _ = node(directory)
    accelerator.load_state("latest")
    accelerator.save_state()


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_nodes_loads_it(tmp_path: Path, before: int, after: int) -> None:
    run(saved, str(tmp_path), 1.0, processes=before)
    for rank in range(after):
        (tmp_path / f"disk-{rank}").mkdir(exist_ok=True)
    sent(tmp_path)
    found = run(loaded, str(tmp_path), processes=after)
    assert [(value, number) for value, _, number in found] == [(1.0, 1)] * after
    left = files(tmp_path / "common")
    sent(tmp_path)
    assert files(tmp_path / "common") == left  # node 1 has written nothing where node 0 keeps its copy


def explicit(directory: str) -> Any:
    """A place that the script names itself, under the root and outside it."""
    accelerator, model, _, _ = node(directory)
    told = []
    for place in (disk(directory) / "mine", Path(directory) / f"elsewhere-{accelerator.process_index}"):
        fill(model, 5.0)
        assert accelerator.save_state(place) == str(place)
        fill(model, 0.0)
        accelerator.load_state(place)
        told.append(value_of(model))
    return told, accelerator.project_dir, accelerator.logging_dir


def test_places_that_the_script_names(tmp_path: Path) -> None:
    for rank, (told, project, logs) in enumerate(run(explicit, str(tmp_path))):
        assert told == [5.0, 5.0]
        assert project == logs == f"{tmp_path}/disk-{rank}/run"
        own = tmp_path / f"disk-{rank}" / ("node-1" if rank else "") / "mine"
        assert find_damage(own) is None
        assert find_damage(tmp_path / f"elsewhere-{rank}") is None


def apart(directory: str) -> None:
    """Nodes that do not know that they have no directory in common: another disk is mounted there on one of them."""
    accelerator, _, _, _ = simple()
    if accelerator.process_index == 1:
        assert ctypes.CDLL(None).unshare(_NEW_MOUNTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", directory], check=True)
    accelerator.save_state(Path(directory) / "here")


def test_a_directory_that_is_not_common_is_named_with_the_remedy(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        missing("root", "mounting another disk needs it")
    for outcome in outcomes(apart, str(tmp_path)):
        assert outcome.error == "CheckpointError"
        assert outcome.message == (
            f"saving {tmp_path}/here: process 1: {tmp_path} is not shared with process 0's node: use a shared file "
            "system, or ProjectConfiguration(save_on_each_node=True) for a copy on each node"
        )


def test_directories_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_PROJECT_ROOT", "/opt/kept")
    made = ProjectConfiguration(project_dir="run", logging_dir="run/logs")
    assert (made.project_dir, made.logging_dir) == ("/opt/kept/run", "/opt/kept/run/logs")
    assert ProjectConfiguration(project_dir="/data/run").project_dir == "/data/run"
    assert ProjectConfiguration().project_dir is None
    monkeypatch.setenv("ACCEL_PROJECT_ROOT", "kept")
    with pytest.raises(ArgumentError, match="ACCEL_PROJECT_ROOT='kept' must be an absolute path"):
        ProjectConfiguration(project_dir="run")
