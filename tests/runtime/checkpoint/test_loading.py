"""Loading reads only what the manifest lists, and changes nothing before all of it is checked."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel.checkpoint.file_names import MANIFEST
from accel.errors import CheckpointError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin

from ..small import Tally, fill, simple
from ..worlds import run, run_one


def _refused(accelerator: Accelerator, directory: Path) -> str:
    try:
        accelerator.load_state(directory)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def _recipe(directory: str) -> list[Any]:
    config = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True)
    accelerator, model, _, _ = simple(project_config=config)
    returned: list[Any] = [accelerator.load_state("latest", missing_ok=True)]
    returned.append(accelerator.load_state(Path(directory) / "nowhere", missing_ok=True))
    (Path(directory) / "mounted").mkdir(exist_ok=True)
    (Path(directory) / "mounted" / "arguments.json").write_text("{}")
    returned.append(accelerator.load_state(Path(directory) / "mounted", missing_ok=True))
    try:
        accelerator.load_state(Path(directory) / "mounted" / "arguments.json", missing_ok=True)
    except CheckpointError as error:
        returned.append(str(error).rpartition("arguments.json ")[2])
    fill(model, 2.0)
    saved = Path(accelerator.save_state())
    returned.append(accelerator.load_state("latest", missing_ok=True))
    (saved / "optimizer.bin").write_bytes(b"")
    for place in ("latest", saved):
        try:
            returned.append(accelerator.load_state(place, missing_ok=True))
        except CheckpointError as error:
            returned.append("optimizer.bin has 0 bytes" in str(error))
    return returned


def test_no_checkpoint_is_no_error_where_it_may_be_missing_but_damage_is(tmp_path: Path) -> None:
    assert run(_recipe, str(tmp_path)) == [[False, False, False, "is not a directory", True, True, True]] * 2


class _Fails(Tally):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this one")


def _misfits(directory: str) -> list[tuple[str, bool]]:
    """For each thing that does not fit: the error, and True if models, optimizer and generators are as they were."""
    seen = []
    for kind in ("second model", "groups", "object", "hook"):
        accelerator = Accelerator(cpu=True)
        models: list[Any] = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizer: Any = torch.optim.Adam([p for model in models for p in model.parameters()], lr=0.1)
        *models, optimizer = accelerator.prepare(*models, optimizer)
        accelerator.register_for_checkpointing(Tally())
        accelerator.backward(models[1](models[0](torch.ones(1, 2))).sum())
        optimizer.step()
        place = Path(directory) / kind
        accelerator.save_state(place)
        accelerator = Accelerator(cpu=True)
        models = [nn.Linear(2, 2), nn.Linear(2, 3 if kind == "second model" else 2)]
        parameters = [p for model in models for p in model.parameters()]
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}] if kind == "groups" else parameters
        optimizer = torch.optim.Adam(groups, lr=0.5)
        *models, optimizer = accelerator.prepare(*models, optimizer)
        accelerator.register_for_checkpointing(_Fails() if kind == "object" else Tally())
        if kind == "hook":
            accelerator.register_load_state_pre_hook(lambda models, folder: models[9])
        before = [parameter.clone() for parameter in parameters]
        generator = torch.get_rng_state()
        error = _refused(accelerator, place)
        same = all(map(torch.equal, before, parameters)) and not optimizer.state and optimizer.defaults["lr"] == 0.5
        seen.append((error, same and torch.equal(generator, torch.get_rng_state())))
    return seen


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    seen = run_one(_misfits, str(tmp_path))
    reasons = ("model 1 does not fit: weight", "its groups have [4] parameters", "not this one", "list index out of")
    for (error, unchanged), reason in zip(seen, reasons, strict=True):
        assert reason in error
        assert unchanged, reason


def _sharded(directory: str) -> None:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    model: Any = accelerator.prepare(nn.Linear(4, 4))
    fill(model, 1.0)
    accelerator.save_state(directory)


def _beside(directory: str, first: str) -> list[Any]:
    """Save whole models where a sharded one was, put its files beside them, and load; then without the manifest."""
    place = Path(directory)
    accelerator = Accelerator()
    model: Any = accelerator.prepare(nn.Linear(4, 4))
    fill(model, 2.0)
    accelerator.save_state(place)
    if accelerator.is_main_process:
        assert not (place / "chunks").exists()
        shutil.copytree(Path(first, "chunks"), place / "chunks")
    accelerator.wait_for_everyone()
    fill(model, 0.0)
    accelerator.load_state(place)
    loaded = {value.item() for parameter in model.parameters() for value in parameter.flatten()}
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (place / MANIFEST).unlink()
    accelerator.wait_for_everyone()
    return [loaded, _refused(accelerator, place)]


def test_files_of_another_save_are_never_read(tmp_path: Path) -> None:
    run(_sharded, str(tmp_path / "here"))
    shutil.copytree(tmp_path / "here", tmp_path / "first")
    for loaded, error in run(_beside, str(tmp_path / "here"), str(tmp_path / "first")):
        assert loaded == {2.0}
        assert f"has no {MANIFEST}, but chunks/node_0/rank_" in error


def _taken_by_a_hook(directory: str) -> str:
    accelerator, _, _, _ = simple()
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    accelerator.save_state(directory)
    handle.remove()
    return _refused(accelerator, Path(directory))


def test_weights_that_a_hook_has_saved_need_a_hook_that_loads_them(tmp_path: Path) -> None:
    assert "weights of model 0 were saved by a hook" in run_one(_taken_by_a_hook, str(tmp_path / "here"))
