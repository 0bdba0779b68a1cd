"""Checkpoints: whole or not there, verified, and told on all processes when they fail."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from accel import ProjectConfiguration
from accel.checkpoint.contents import Piece
from accel.checkpoint.durable import Digest
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.manifest import find_damage
from accel.errors import CheckpointError
from tests.marks import long

from ..small import fill, save_twice, simple, value_of
from ..worlds import outcomes, run, run_one


def _what(directory: str, **how: Any) -> tuple[float, Any]:
    accelerator, model, _, tally = simple(**how)
    accelerator.load_state(directory or None)
    return value_of(model), tally.value


@pytest.mark.parametrize("processes", [1, 2])
def test_saving_again_replaces_the_whole_and_keeps_the_scripts_files(tmp_path: Path, processes: int) -> None:
    place = tmp_path / "here"
    run(save_twice, str(place), processes=processes)
    assert find_damage(place) is None
    assert (place / "notes.txt").read_text() == "the script's own"
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]
    expected = {"model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl", MANIFEST, "notes.txt"}
    assert {entry.name for entry in place.iterdir()} == expected | {f"random_states_{r}.pkl" for r in range(processes)}
    assert run(_what, str(place), processes=processes) == [(2.0, 2.0)] * processes


def _no_space(directory: str) -> tuple[str, float]:
    accelerator, model, _, _ = simple()
    fill(model, 1.0)
    accelerator.save_state(directory)
    fill(model, 2.0)
    if accelerator.process_index == 1:
        accelerator.register_save_state_pre_hook(_full_disk)
    message = ""
    try:
        accelerator.save_state(directory)
    except CheckpointError as error:
        message = str(error)
    accelerator.load_state(directory)
    return message, value_of(model)


def _full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_fails_on_one_process_is_told_on_all(tmp_path: Path) -> None:
    place = tmp_path / "here"
    for message, value in run(_no_space, str(place)):
        assert message == f"saving {place}: process 1: the disk is full; the last complete checkpoint is {place}"
        assert value == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]


def _harmed(directory: str, harm: str) -> list[Any]:
    """A file of the second process is cut or deleted when it was written, before the checkpoint is published."""
    accelerator, model, _, _ = simple()
    place = Path(directory) / "here"
    fill(model, 1.0)
    accelerator.save_state(place)
    fill(model, 2.0)
    if accelerator.process_index == 1:
        write = Piece.write

        def harmed(piece: Piece, folder: Path) -> Digest:
            digest = write(piece, folder)
            if harm == "missing":
                (folder / piece.name).unlink()
            else:
                os.truncate(folder / piece.name, digest.length - 1)
            return digest

        Piece.write = harmed  # type: ignore[method-assign, assignment]
    messages: list[Any] = []
    for name in ("here", "new"):
        try:
            accelerator.save_state(place.with_name(name))
        except CheckpointError as error:
            messages.append(str(error))
    accelerator.load_state(place)
    return [*messages, value_of(model)]


@pytest.mark.parametrize(("harm", "said"), [("missing", "is missing"), ("cut", r"has \d+ bytes, but \d+ were written")])
def test_a_piece_that_is_not_as_it_was_written_is_not_published(tmp_path: Path, harm: str, said: str) -> None:
    for *messages, value in run(_harmed, str(tmp_path), harm):
        for name, message in zip(("here", "new"), messages, strict=True):
            assert re.fullmatch(rf"saving {tmp_path / name}: process 0: \S+/random_states_1.pkl {said}", message)
        assert value == 1.0
    assert [entry.name for entry in tmp_path.iterdir()] == ["here"]
    assert find_damage(tmp_path / "here") is None


def _automatic(directory: str, times: int) -> list[str]:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=2)
    accelerator, model, _, tally = simple(project_config=project)
    for value in range(times):
        fill(model, float(value))
        tally.value = value
        accelerator.save_state()
    return sorted(os.listdir(Path(directory) / "checkpoints"))


def _failing_automatic(directory: str) -> list[str]:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=1)
    accelerator, _, _, _ = simple(project_config=project)
    accelerator.save_state()
    accelerator.register_save_state_pre_hook(_full_disk)
    with pytest.raises(CheckpointError):
        accelerator.save_state()
    return sorted(os.listdir(Path(directory) / "checkpoints"))


def test_old_checkpoints_go_after_the_new_one_is_whole(tmp_path: Path) -> None:
    assert run_one(_automatic, str(tmp_path / "a"), 4) == ["checkpoint_2", "checkpoint_3"]
    assert run_one(_failing_automatic, str(tmp_path / "b")) == ["checkpoint_0"]


def _newest(directory: str) -> Any:
    import logging

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True)
    accelerator, _, _, tally = simple(project_config=project)
    try:
        accelerator.load_state()
    except CheckpointError as error:
        return str(error)
    return tally.value, accelerator.save_iteration, told


def test_the_newest_whole_one_loads_and_the_damaged_is_named(tmp_path: Path) -> None:
    run_one(_automatic, str(tmp_path), 3)
    folder = tmp_path / "checkpoints"
    assert run_one(_newest, str(tmp_path)) == (2, 3, [])
    weights = folder / "checkpoint_2" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    said = f"{weights} has changed since it was written (its checksum differs)"
    assert run_one(_newest, str(tmp_path)) == (1, 2, [f"skipped: {said}"])
    (folder / "checkpoint_1" / "optimizer.bin").unlink()
    ended = run_one(_newest, str(tmp_path))
    assert (
        f"{folder} holds no complete checkpoint: {said}; {folder / 'checkpoint_1' / 'optimizer.bin'} is missing"
        in ended
    )


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", MANIFEST]
)
@pytest.mark.parametrize("harm", ["flipped", *long("cut", "missing")])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, harm: str) -> None:
    place = tmp_path / "here"
    run_one(save_twice, str(place))
    path = place / name
    content = path.read_bytes()
    if harm == "missing":
        path.unlink()
    elif harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:40] + bytes([content[40] ^ 255]) + content[41:])
    if (name, harm) == (MANIFEST, "missing"):
        assert find_damage(place) == f"{place} has no {MANIFEST}"
        return
    ended = outcomes(_what, str(place), processes=1)[0]
    assert ended.error == "CheckpointError"
    assert str(path) in ended.message
    assert "\n" not in ended.message


def test_a_place_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    ended = outcomes(_what, str(tmp_path / "nowhere"), processes=1)[0]
    assert ended.message == f"loading a checkpoint: {tmp_path / 'nowhere'} does not exist"
    ended = outcomes(_what, "", processes=1)[0]
    assert ended.message == "load_state() without a directory needs Accelerator(project_dir=…)"


def _other_world(directory: str) -> Any:
    accelerator, model, _, tally = simple()
    accelerator.load_state(directory)
    return value_of(model), tally.value


def test_another_number_of_processes_loads_and_lost_generators_do_not(tmp_path: Path) -> None:
    """Accelerate's defect 7: a missing file of generators was passed over in silence."""
    place = tmp_path / "here"
    run(save_twice, str(place))
    assert run_one(_other_world, str(place)) == (2.0, 2.0)
    assert run(_other_world, str(place), processes=3) == [(2.0, 2.0)] * 3
    (place / "random_states_1.pkl").unlink()
    for outcome in outcomes(_other_world, str(place)):
        assert outcome.error == "CheckpointError"
        assert f"{place / 'random_states_1.pkl'} is missing" in outcome.message
    (place / MANIFEST).unlink()
    (place / "random_states_0.pkl").rename(place / "random_states_1.pkl")
    for outcome in outcomes(_other_world, str(place)):
        assert outcome.message == f"{place} has no random_states_0.pkl"


def _numbers(directory: str) -> list[Any]:
    project = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True)
    accelerator, _, _, _ = simple(project_config=project)
    accelerator.load_state(Path(directory, "checkpoints", "checkpoint_1"))
    numbers = [accelerator.save_iteration]
    os.kill(os.getpid(), signal.SIGTERM) if accelerator.preempted is False else None
    while not accelerator.preempted:
        pass
    with pytest.raises(SystemExit):
        accelerator.checkpoint_on_preemption()
    numbers.append(accelerator.save_iteration)
    accelerator.save_iteration = 7
    return [*numbers, Path(accelerator.save_state()).name]


def test_a_checkpoint_that_is_named_sets_the_next_number(tmp_path: Path) -> None:
    run_one(_automatic, str(tmp_path), 2)
    assert run_one(_numbers, str(tmp_path)) == [2, 3, "checkpoint_7"]
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == [f"checkpoint_{number}" for number in (0, 1, 2, 7)]
