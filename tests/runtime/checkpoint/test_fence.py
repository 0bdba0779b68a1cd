"""A process of an earlier start of a job leaves the checkpoints alone, whenever it finds out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from accel import Accelerator
from accel.checkpoint import manifest, writer
from accel.errors import CheckpointError


@pytest.fixture
def newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "attempt"
    file.write_text("1\n")
    monkeypatch.setenv(writer.FENCE, str(file))
    monkeypatch.setenv(writer.ATTEMPT, "1")
    return file


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def prepared() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return accelerator


@pytest.mark.parametrize(("text", "refused"), [("0", False), ("1", False), ("2", True), ("10", True), ("", False)])
def test_the_newest_start_may_write(newest: Path, text: str, refused: bool) -> None:
    newest.write_text(text)
    if not refused:
        writer.check_fence()
        return
    with pytest.raises(CheckpointError, match=f"start {text} of this job has begun .* belongs to start 1"):
        writer.check_fence()


def test_a_fence_that_is_gone_bars_nobody(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest.unlink()
    writer.check_fence()
    monkeypatch.delenv(writer.FENCE)
    writer.check_fence()


def test_a_save_is_refused_before_anything_is_touched(newest: Path, tmp_path: Path) -> None:
    accelerator = prepared()
    place = tmp_path / "runs/checkpoint"
    accelerator.save_state(place)
    draft = place.with_name(".checkpoint.draft-0123abcd")  # the new start is writing this
    draft.mkdir()
    newest.write_text("2")
    with pytest.raises(CheckpointError, match="start 2 of this job has begun"):
        accelerator.save_state(place)
    assert names(place.parent) == [".checkpoint.draft-0123abcd", "checkpoint"]


def test_a_save_under_way_is_not_put_in_place(newest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = manifest.write_manifest

    def late(*given: object) -> None:
        write(*given)  # type: ignore[arg-type]
        newest.write_text("2")

    monkeypatch.setattr(writer, "write_manifest", late)
    accelerator = prepared()
    with pytest.raises(CheckpointError, match="start 2 of this job has begun"):
        accelerator.save_state(tmp_path / "runs/checkpoint")
    assert names(tmp_path / "runs") == []
