"""Saving on a full disk, which is a real one of a few megabytes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel import Accelerator
from accel.checkpoint.durable import reporting_full_disk, write_durably
from accel.errors import ArgumentError, CheckpointError
from tests.needs import missing

from ..worlds import run, run_one


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """The mount point of a file system of 6 MB."""
    if os.geteuid() != 0:
        missing("root", "mounting a small file system needs it")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def _prepared() -> tuple[Accelerator, Any]:
    """A run whose checkpoints take 3.6 MB, a third of it in its model."""
    accelerator = Accelerator()
    raw = nn.Linear(300, 1000, bias=False)
    model, optimizer = accelerator.prepare(raw, torch.optim.Adam(raw.parameters()))
    accelerator.backward(model(torch.ones(1, 300)).sum())
    optimizer.step()
    return accelerator, model


def _safetensors(_: Any, weights: list[Any], directory: str) -> None:
    save_file({"large": torch.ones(1 << 20)}, Path(directory) / "large.safetensors")


def _torch(_: Any, weights: list[Any], directory: str) -> None:
    torch.save({"large": torch.ones(1 << 20)}, Path(directory) / "large.bin")


def _beside(accelerator: Accelerator, place: Path) -> None:
    accelerator.save_state(place, async_save=True)
    accelerator.wait_for_checkpoint()


def _with_hook(hook: Callable[..., None]) -> Callable[[Accelerator, Path], None]:
    def save(accelerator: Accelerator, place: Path) -> None:
        handle = accelerator.register_save_state_pre_hook(hook)
        try:
            accelerator.save_state(place)
        finally:
            handle.remove()

    return save


STATES: dict[str, Callable[[Accelerator, Path], Any]] = {
    "state": lambda accelerator, place: accelerator.save_state(place),
    "state, pickled": lambda accelerator, place: accelerator.save_state(place, safe_serialization=False),
    "state, beside": _beside,
    "a hook's safetensors": _with_hook(_safetensors),
    "a hook's archive": _with_hook(_torch),
}


def _states(disk: str) -> dict[str, list[Any]]:
    """What each way of saving a second state raises, and what is on the disk afterwards."""
    accelerator, _ = _prepared()
    accelerator.save_state(Path(disk, "one"))
    return {name: _full(partial(save, accelerator, Path(disk, "two")), disk) for name, save in STATES.items()}


def _models(disk: str) -> dict[str, list[Any]]:
    accelerator, model = _prepared()
    accelerator.save_model(model, Path(disk, "model"))
    if accelerator.is_main_process:
        Path(disk, "filling").write_bytes(bytes(4 << 20))
    accelerator.wait_for_everyone()
    weights = {"weight": torch.ones(1 << 20)}
    return {
        "model": _full(lambda: accelerator.save_model(model, Path(disk, "model")), disk),
        "pickled": _full(lambda: accelerator.save_model(model, Path(disk, "model"), safe_serialization=False), disk),
        "shards": _full(lambda: accelerator.save_model(model, Path(disk, "model"), max_shard_size="10KB"), disk),
        "object": _full(lambda: accelerator.save(weights, Path(disk, "model", "any.bin")), disk),
        "tensors": _full(lambda: accelerator.save(weights, Path(disk, "model", "t"), safe_serialization=True), disk),
    }


def _full(save: Callable[[], Any], disk: str) -> list[Any]:
    try:
        save()
    except CheckpointError as error:
        return [str(error), sorted(path.name for path in Path(disk).iterdir())]
    return ["", []]


def test_a_state_that_does_not_fit_names_the_full_disk_and_the_last_whole_one(disk: Path) -> None:
    """What a script's hooks write is named by their writers, which drop the system's error number."""
    told = (
        rf"saving {disk}/two: the disk is full \([0-2] MB left on {disk}\): {disk}/\.two\.draft-\w+/(model|optimizer)"
        rf"\S+; the last complete checkpoint is {disk}/one"
    )
    for way, (message, left) in run_one(_states, str(disk)).items():
        hooks_own = rf"saving {disk}/two: (SafetensorError|RuntimeError): .*"
        assert re.fullmatch(hooks_own if "hook" in way else told, message), way
        assert left == ["one"], way


@pytest.mark.parametrize("processes", [1, 2])
def test_a_model_or_an_object_that_does_not_fit_names_the_full_disk(disk: Path, processes: int) -> None:
    """On the main process, which alone writes them."""
    for rank, ways in enumerate(run(_models, str(disk), processes=processes)):
        for way, (message, left) in ways.items():
            if rank > 0:
                assert message == ""
                continue
            name = {"object": "/any.bin", "tensors": "/t"}.get(way, "")
            file = rf"{disk}/model/\.\S+\.draft"
            assert re.fullmatch(
                rf"saving {disk}/model{name}: the disk is full \([01] MB left on {disk}\): {file}", message
            )
            assert left == ["filling", "model"]
    assert [path.name for path in (disk / "model").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("number", "said"), [(errno.EDQUOT, "the disk quota is used up"), (errno.ENOSPC, "the disk is full")]
)
def test_a_full_disk_is_known_by_its_number_and_named_by_its_file(tmp_path: Path, number: int, said: str) -> None:
    """Also where the folder of the file is missing, and where another error hides it."""
    with pytest.raises(CheckpointError, match=f"^{said}; more$"), reporting_full_disk("; more"):
        raise OSError(number, "as the system says")
    path = str(tmp_path / "gone" / "file")
    told = rf"^{said} \(\d+ MB left on /.*\): {path}; more$"
    with pytest.raises(CheckpointError, match=told), reporting_full_disk("; more"):
        raise RuntimeError("a writer's own") from OSError(number, "as the system says", path)


def test_the_disk_is_that_of_the_file_that_failed(disk: Path) -> None:
    told = rf"^the disk is full \(\d MB left on {disk}\): {disk}/large$"
    with pytest.raises(CheckpointError, match=told), reporting_full_disk():
        write_durably(disk / "large", lambda file: file.write(bytes(8 << 20)))


def _touch(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / str(number)).touch()


def test_used_up_inodes_are_named(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=3", disk], check=True)
    told = rf"^the disk has no inodes left \(6 MB left on {disk}\): {disk}/\d$"
    with pytest.raises(CheckpointError, match=told), reporting_full_disk():
        _touch(disk, 4)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        ArgumentError("a wrong argument"),
    ],
)
def test_other_errors_stay_as_they_are(disk: Path, error: Exception) -> None:
    """On a full disk too: it may have nothing to do with them."""
    (disk / "filling").write_bytes(bytes(6 << 20))
    with pytest.raises(type(error)) as raised, reporting_full_disk():
        raise error
    assert raised.value is error
