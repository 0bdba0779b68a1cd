"""The functions of `accelerate.checkpointing`, which write and read a checkpoint's files, with sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel import Accelerator
from accel.checkpoint.file_names import MANIFEST
from accel.errors import CheckpointError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin as Plugin
from tests.runtime.small import fill, simple, value_of
from tests.runtime.worlds import run, run_one

from .training import decoder, train


def _again(folder: str) -> tuple[list[str], list[float], list[float]]:
    from accel.compat.checkpointing import load_accelerator_state, save_accelerator_state

    accelerator: Any = Accelerator(fsdp_plugin=Plugin())
    model: Any = decoder()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    train(accelerator, model, optimizer, steps=2)
    weights = [accelerator.get_state_dict(model)]
    save_accelerator_state(folder, weights, [optimizer], [], [], accelerator.process_index, 0)
    accelerator.wait_for_everyone()
    expected, _ = train(accelerator, model, optimizer, steps=2, first=2)
    load_accelerator_state(folder, [model], [optimizer], [], [], accelerator.process_index)
    files = sorted(path.name for path in Path(folder).iterdir())
    return files, train(accelerator, model, optimizer, steps=2, first=2)[0], expected


def test_they_hold_whole_weights_and_go_on_to_the_bit(tmp_path: Path) -> None:
    for files, again, expected in run(_again, str(tmp_path)):
        assert again == expected
        assert {"model.safetensors", "optimizer.bin"} <= set(files)


def _beside_a_manifest(directory: str) -> list[Any]:
    """Save and load where `save_state` has saved: with its manifest, with a file of another save, and without it."""
    from accel.compat.checkpointing import load_accelerator_state, save_accelerator_state

    accelerator, model, optimizer, _ = simple()
    fill(model, 1.0)
    accelerator.save_state(directory)
    fill(model, 2.0)
    seen: list[Any] = []
    try:
        save_accelerator_state(directory, [model.state_dict()], [optimizer], [], [], 0, 0)
    except CheckpointError as error:
        seen.append(str(error))
    seen += [load_accelerator_state(directory, [model], [optimizer], [], [], 0), value_of(model)]

    def refused() -> None:
        fill(model, 3.0)
        try:
            load_accelerator_state(directory, [model], [optimizer], [], [], 0)
        except CheckpointError as error:
            seen.append(str(error))
        seen.append(value_of(model))

    (Path(directory) / "optimizer.bin").write_bytes(b"of another save")
    refused()
    (Path(directory) / MANIFEST).unlink()
    (Path(directory) / "gradients_0.bin").write_bytes(b"of another save")
    refused()
    return seen


def test_they_do_not_mix_with_a_checkpoint_of_save_state(tmp_path: Path) -> None:
    place = tmp_path / "here"
    refused, step, loaded, changed, before, incomplete, also_before = run_one(_beside_a_manifest, str(place))
    assert refused == f"save_accelerator_state: {place} has a checkpoint of save_state: use another directory"
    assert (step, loaded) == ({"step": 0}, 1.0)
    assert changed.startswith(f"{place / 'optimizer.bin'} has 15 bytes, but ")
    assert incomplete == f"{place} has no {MANIFEST}, but gradients_0.bin, which only accel writes: it is incomplete"
    assert before == also_before == 3.0


class _Noted(torch.nn.Linear):
    note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _with_extra_state(directory: str) -> Any:
    from accel.compat.checkpointing import load_accelerator_state, save_accelerator_state

    accelerator = Accelerator()
    model = _Noted(2, 2)
    accelerator.prepare(model)
    model.note = "kept"
    save_accelerator_state(directory, [model.state_dict()], [], [], [], 0, 0)
    model.note = "lost"
    load_accelerator_state(directory, [model], [], [], [], 0)
    return model.note, sorted(path.name for path in Path(directory).iterdir())


def test_they_write_only_files_that_accelerate_reads(tmp_path: Path) -> None:
    assert run_one(_with_extra_state, str(tmp_path)) == ("kept", ["pytorch_model.bin", "random_states_0.pkl"])
