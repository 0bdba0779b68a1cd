"""Loading reads only what the manifest lists, and changes nothing before all of it is checked."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel import Accelerator, ProjectConfiguration
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.manifest import find_damage
from accel.checkpoint.merge import merge_fsdp_weights
from accel.errors import CheckpointError
from accel.parallel.shares import share
from accel.plugins.fsdp import FullyShardedDataParallelPlugin

from ..small import Tally, fill, simple, value_of
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


def _snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def _numbered(directory: str, width: int, saves: int) -> list[Any]:
    """The recipe: load the latest, or begin, and save; its errors, and True if the directory is as it was."""
    config = ProjectConfiguration(project_dir=directory, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    accelerator.prepare(nn.Linear(width, 1))
    before = _snapshot(Path(directory))
    errors = []
    try:
        accelerator.load_state("latest", missing_ok=True)
    except CheckpointError as error:
        errors.append(str(error))
    for _ in range(saves):
        try:
            accelerator.save_state()
        except CheckpointError as error:
            errors.append(str(error))
    return [errors, _snapshot(Path(directory)) == before]


@pytest.mark.parametrize("saves", [1, 3])
def test_after_a_load_that_does_not_fit_nothing_is_changed_or_deleted(tmp_path: Path, saves: int) -> None:
    """Also where `total_limit` has deleted the number with which a new run begins."""
    assert run(_numbered, str(tmp_path), 3, saves) == [[[], False]] * 2
    newest = tmp_path / "checkpoints" / f"checkpoint_{saves - 1}"
    for errors, unchanged in run(_numbered, str(tmp_path), 4, 1):
        misfit, exists = errors
        assert misfit.startswith(f"loading {newest}: process 0: ")
        assert "weight has shape (1, 3), but (1, 4) in this run" in misfit
        first = newest.with_name(f"checkpoint_{max(0, saves - 2)}")  # of the two that are kept
        assert exists == f"{first} exists: call load_state() first to resume, or set save_iteration"
        assert unchanged


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


def _numbers(directory: str) -> list[Any]:
    """Load with fewer registered objects than were saved, with as many but without the schedule, and with more."""
    logged: list[Any] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel").addHandler(handler)
    accelerator, _, optimizer, _ = simple()
    accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer))
    accelerator.register_for_checkpointing(Tally())
    accelerator.save_state(directory)
    seen = []
    for more in range(3):
        accelerator, _, _, _ = simple()
        accelerator.register_for_checkpointing(*(Tally() for _ in range(more)))
        seen.append(_refused(accelerator, Path(directory)))
    return [*seen, logged]


def test_other_numbers_of_objects_than_were_saved(tmp_path: Path) -> None:
    """As in Accelerate: registered objects must be as many, schedules and loaders may be fewer."""
    place = tmp_path / "here"
    fewer, loaded, more, logged = run_one(_numbers, str(place))
    assert fewer.startswith(f"loading {place}: {place} has custom_checkpoint_1.pkl, but this run has no object for it")
    assert loaded == "loaded"
    assert f"{place} has no custom_checkpoint_2.pkl: it was saved with fewer objects prepared" in more
    assert logged == [f"{place}: scheduler.bin not loaded: fewer schedulers or loaders are prepared"]


def _misfit_on_one(directory: str, how: str, kind: str) -> list[Any]:
    """Load what does not fit on the second process alone: the error, and True if nothing here has changed."""
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT") if how == "sharded" else None
    for saves in (True, False):
        accelerator = Accelerator(fsdp_plugin=plugin)
        odd = accelerator.process_index == 1 and not saves
        model: Any = nn.Linear(4, 4)
        parameters = list(model.parameters())
        groups: Any = [{"params": [p]} for p in parameters] if kind == "groups" and odd else parameters
        optimizer: Any = torch.optim.Adam(groups, lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(_Fails() if kind == "object" and odd else Tally())
        if saves:
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            accelerator.save_state(directory)
            accelerator.free_memory()
    fill(model, 2.0)
    generator = torch.get_rng_state()
    error = _refused(accelerator, Path(directory))
    weights = torch.cat([share(parameter).detach().flatten() for parameter in model.parameters()])
    same = bool((weights == 2).all()) and not optimizer.state and torch.equal(generator, torch.get_rng_state())
    return [error, same]


@pytest.mark.parametrize("how", ["whole", "sharded"])
@pytest.mark.parametrize(("kind", "said"), [("groups", "group"), ("object", "not this one")])
def test_what_does_not_fit_on_one_process_changes_nothing_on_any(
    tmp_path: Path, how: str, kind: str, said: str
) -> None:
    place = tmp_path / "here"
    for error, unchanged in run(_misfit_on_one, str(place), how, kind):
        assert error.startswith(f"loading {place}: process 1: ")
        assert said in error
        assert unchanged


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


def _over(directory: str) -> list[Any]:
    """Save whole models over what is there, and load."""
    accelerator = Accelerator()
    model: Any = accelerator.prepare(nn.Linear(4, 4))
    fill(model, 2.0)
    accelerator.save_state(directory)
    fill(model, 0.0)
    accelerator.load_state(directory)
    return [value_of(model)]


def _load_sharded(directory: str) -> list[float]:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    model: Any = accelerator.prepare(nn.Linear(4, 4))
    accelerator.load_state(directory)
    weights = accelerator.get_state_dict(model).values()
    return sorted({value for tensor in weights for value in tensor.flatten().tolist()})


@pytest.mark.parametrize("harm", ["cut", "deleted"])
def test_a_save_over_one_whose_manifest_is_damaged_is_what_is_loaded(tmp_path: Path, harm: str) -> None:
    place = tmp_path / "here"
    run(_sharded, str(place))
    manifest = place / MANIFEST
    if harm == "cut":
        manifest.write_bytes(manifest.read_bytes()[:-9])
    else:
        manifest.unlink()
    assert run(_over, str(place)) == [[2.0]] * 2
    assert (place / "chunks").exists()  # nothing lists them any more
    assert find_damage(place) is None
    first, _ = run(_load_sharded, str(place))
    assert first == [2.0]
    with pytest.raises(CheckpointError, match="holds no weights in chunks"):
        merge_fsdp_weights(place, tmp_path / "merged")
    shutil.rmtree(place / "chunks")  # the manifest decides, not what is there
    with pytest.raises(CheckpointError, match="holds no weights in chunks"):
        merge_fsdp_weights(place, tmp_path / "merged")
    manifest.unlink()
    (place / "chunks").mkdir()
    with pytest.raises(CheckpointError, match=f"has no {MANIFEST}$"):
        merge_fsdp_weights(place, tmp_path / "merged")


def _windows(directory: str) -> list[Any]:
    """Save in an open window, then in a closed one; copy the gradients of the first to the second, and load it."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model: Any = accelerator.prepare(nn.Linear(4, 4))
    parameters = list(accelerator.unwrap_model(model).parameters())
    opened, closed = Path(directory) / "open", Path(directory) / "closed"
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())
    accelerator.save_state(opened)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())
    for parameter in parameters:
        parameter.grad = None
    accelerator.save_state(closed)
    copied = opened / f"gradients_{accelerator.process_index}.bin"
    shutil.copy(copied, closed)
    accelerator.wait_for_everyone()
    seen = []
    for place in (opened, closed):
        accelerator.load_state(place)
        seen.append([parameter.grad is not None for parameter in parameters])
    return seen


def test_gradients_of_an_older_window_are_never_read(tmp_path: Path) -> None:
    assert run(_windows, str(tmp_path)) == [[[True, True], [False, False]]] * 2


def _taken_by_a_hook(directory: str) -> str:
    accelerator, _, _, _ = simple()
    handle = accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    accelerator.save_state(directory)
    handle.remove()
    return _refused(accelerator, Path(directory))


def test_weights_that_a_hook_has_saved_need_a_hook_that_loads_them(tmp_path: Path) -> None:
    assert "weights of model 0 were saved by a hook" in run_one(_taken_by_a_hook, str(tmp_path / "here"))
