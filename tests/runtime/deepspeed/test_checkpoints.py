"""Checkpoints of DeepSpeed's engine: resumed to the bit, verified by our manifest, and whole weights at every stage."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator, PartialState, ProjectConfiguration
from accel.tensor_files import SafetensorsFile, read_all
from tests import needs
from tests.runtime.sharding.training import decoder, loss_of
from tests.runtime.small import Tally, renew_manifest
from tests.runtime.worlds import outcomes, run, run_one

from .training import accelerator_of, epoch, loader, message_of, optimizer_of, plugin, quiet

if find_spec("deepspeed") is None:
    needs.missing("deepspeed", "pip install --no-build-isolation -c constraints.txt deepspeed")

STAGES = (0, 1, 2, 3)
Saved = tuple[Path, list[dict[int, dict[str, Any]]]]


def _plugins() -> dict[str, Any]:
    return {str(stage): plugin(stage, zero3_save_16bit_model=True) for stage in STAGES}


def _prepared(accelerator: Any, seed: int = 0) -> tuple[Any, Any]:
    model: Any = decoder(seed).float()
    prepared: tuple[Any, Any] = accelerator.prepare(model, optimizer_of(model))
    return prepared


def _weights(accelerator: Any, model: Any) -> dict[str, Any]:
    return {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}


def _saved(folder: Path) -> dict[int, dict[str, Any]]:
    """Save after an epoch at every stage, train on, and come back: into the same engine, then into a fresh one."""
    quiet()
    seen: dict[int, dict[str, Any]] = {}
    accelerator_of(deepspeed_plugins=_plugins())
    for stage in STAGES:
        accelerator = accelerator_of(2)
        accelerator.state.select_deepspeed_plugin(str(stage))
        batches = loader(accelerator)
        model, optimizer = _prepared(accelerator)
        epoch(accelerator, model, optimizer, batches)
        path = folder / str(stage)
        accelerator.save_state(path)
        weights = _weights(accelerator, model)
        accelerator.save_model(model, folder / f"model {stage}")
        after = epoch(accelerator, model, optimizer, batches)
        with accelerator.accumulate(model):  # leaves gradients in an open window
            accelerator.backward(loss_of(model, next(iter(batches))))
        accelerator.load_state(path)
        again = epoch(accelerator, model, optimizer, batches)
        accelerator.free_memory()
        accelerator = accelerator_of(2)
        batches = loader(accelerator)
        model, optimizer = _prepared(accelerator, seed=5)
        accelerator.load_state(path)
        loaded = _weights(accelerator, model)
        fresh = epoch(accelerator, model, optimizer, batches)
        accelerator.free_memory()
        seen[stage] = {"after": after, "again": again, "fresh": fresh, "weights": weights, "loaded": loaded}
    return seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run(_saved, folder)


def test_a_run_resumes_to_the_bit_at_every_stage(saved: Saved) -> None:
    for seen in saved[1]:
        for stage, runs in seen.items():
            assert runs["again"] == runs["after"], stage
            assert runs["fresh"] == runs["after"], stage
            assert runs["loaded"] == runs["weights"], stage


def test_whole_weights_are_gathered_at_every_stage(saved: Saved) -> None:
    folder, (first, second) = saved
    expected = {name: list(value.shape) for name, value in decoder().state_dict().items()}
    for stage in STAGES:
        weights = first[stage]["weights"]
        assert {name: list(torch.tensor(value).shape) for name, value in weights.items()} == expected
        file = SafetensorsFile(folder / f"model {stage}" / "model.safetensors")
        written = {name: read_all(value).tolist() for name, value in file.tensors.items()}
        assert {name: weights[name] for name in written} == written
        assert set(weights) - set(written) <= {"head.weight", "embed.weight"}  # tied
        assert second[stage]["weights"] in ({}, weights)


def _alone(folder: Path) -> tuple[list[str], dict[int, Any]]:
    """Load the checkpoints of two processes in one, and train on."""
    quiet()
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accel.parallel.deepspeed").addHandler(handler)
    accelerator_of(deepspeed_plugins=_plugins())
    runs = {}
    for stage in STAGES:
        accelerator = accelerator_of(2)
        accelerator.state.select_deepspeed_plugin(str(stage))
        batches = loader(accelerator)
        model, optimizer = _prepared(accelerator, seed=5)
        accelerator.load_state(folder / str(stage))
        runs[stage] = epoch(accelerator, model, optimizer, batches)
        accelerator.free_memory()
    return warnings, runs


def test_a_run_resumes_in_another_number_of_processes(saved: Saved) -> None:
    folder, (first, _) = saved
    warnings, runs = run_one(_alone, folder)
    converting = "was saved by 2 process(es): converting it to DeepSpeed's universal format"
    assert [words.partition(" ")[2] for words in warnings] == [converting] * 3  # not stage 0, of which each has all
    for stage, (losses, norms) in runs.items():
        assert losses == pytest.approx(first[stage]["after"][0], abs=1e-5), stage
        assert norms == pytest.approx(first[stage]["after"][1], abs=1e-6), stage
    assert not list(folder.glob(".*"))


def _kept(folder: Path) -> dict[str, Any]:
    """Save two numbered checkpoints, keep one, and load it."""
    quiet()
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=1)
    accelerator = accelerator_of(deepspeed_plugin=plugin(2), project_config=project)
    batches = loader(accelerator)
    model, optimizer = _prepared(accelerator)
    accelerator.save_state()
    epoch(accelerator, model, optimizer, batches)
    accelerator.save_state()
    weights = _weights(accelerator, model)
    epoch(accelerator, model, optimizer, batches)
    accelerator.load_state()
    return {"same": _weights(accelerator, model) == weights, "next": accelerator.save_iteration}


def test_numbered_checkpoints_are_kept_as_without_an_engine(tmp_path: Path) -> None:
    assert run(_kept, tmp_path) == [{"same": True, "next": 2}] * 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_1"]


def _refused(folder: Path) -> list[str]:
    """Load stage 2's checkpoint where it does not fit."""
    quiet()
    accelerator = accelerator_of(2, deepspeed_plugin=plugin(2))
    loader(accelerator)
    model, _ = _prepared(accelerator)
    messages = [
        message_of(lambda: accelerator.load_state(folder / "unconvertible")),
        message_of(lambda: accelerator.load_state(folder / "damaged")),
        message_of(lambda: accelerator.save_state(folder / "new", async_save=True)),
        message_of(lambda: accelerator.load_state(folder / "plain")),
    ]
    with accelerator.accumulate(model):
        messages.append(message_of(lambda: accelerator.save_state(folder / "new")))
    return messages


def _plain(folder: Path, save: bool) -> None:
    accelerator: Any = Accelerator(cpu=True)
    _prepared(accelerator)
    if save:
        accelerator.save_state(folder / "plain")
    else:
        accelerator.load_state(folder / "2")


def test_a_checkpoint_that_does_not_fit_is_one_line(saved: Saved) -> None:
    folder = saved[0]
    run_one(_plain, folder, True)
    damaged = folder / "damaged"
    damaged.mkdir()
    manifest = json.loads((folder / "2" / "accel_manifest.json").read_text())
    assert manifest["models"] == manifest["optimizers"] == ["engine"]
    name = next(name for name in manifest["files"] if name.startswith("pytorch_model/"))
    for path in [path for path in (folder / "2").rglob("*") if path.is_file()]:
        copy = damaged / path.relative_to(folder / "2")
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    unconvertible = folder / "unconvertible"
    shutil.copytree(damaged, unconvertible)
    for path in (unconvertible / "pytorch_model").iterdir():
        path.write_bytes(b"no pickle")
    renew_manifest(unconvertible, schema=3)
    (damaged / name).write_bytes(b"x" * (damaged / name).stat().st_size)
    other_world, damage, background, plain, window = run_one(_refused, folder)
    assert "pytorch_model: DeepSpeed cannot convert it for another world size: " in other_world
    assert f"{name} has changed since it was written" in damage
    assert "DeepSpeed and megatron-core save their models themselves: leave async_save out" in background
    assert "model 0 was not saved by DeepSpeed or megatron-core: load it without deepspeed_plugin" in plain
    assert "save_state in an open accumulation window" in window
    (outcome,) = outcomes(_plain, folder, False, processes=1)
    script, out = folder / "2" / "zero_to_fp32.py", folder / "gathered"
    advice = "model 0 was saved by DeepSpeed: pass deepspeed_plugin, or gather the weights: "
    assert outcome.message.endswith(f"{advice}python {script} {folder / '2'} OUT")
    subprocess.run([sys.executable, script, folder / "2", out], check=True)
    gathered = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert {name: value.tolist() for name, value in gathered.items()} == saved[1][0][2]["weights"]


class _FailsOnOne(Tally):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if PartialState().process_index == 1:
            raise ValueError("not this one")


def _failing(folder: Path) -> list[Any]:
    """The second process alone fails, in a hook when it saves, and in an object of the script's when it loads."""
    quiet()
    accelerator = accelerator_of(2, deepspeed_plugin=plugin(2))
    loader(accelerator)
    model, _ = _prepared(accelerator)
    accelerator.register_for_checkpointing(_FailsOnOne())
    accelerator.save_state(folder / "good")

    def hook(*_: Any) -> None:
        if accelerator.process_index == 1:
            raise ValueError("not this hook")

    handle = accelerator.register_save_state_pre_hook(hook)
    messages: list[Any] = [message_of(lambda: accelerator.save_state(folder / "bad"))]
    handle.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3.0)
    messages.append(message_of(lambda: accelerator.load_state(folder / "good")))
    return [*messages, all(bool((parameter == 3.0).all()) for parameter in model.parameters())]


def test_what_fails_on_one_process_leaves_no_other_waiting_for_the_engine(tmp_path: Path) -> None:
    for saving, loading, unchanged in run(_failing, tmp_path):
        assert saving == f"saving {tmp_path / 'bad'}: process 1: ValueError: not this hook"
        assert loading.startswith(f"loading {tmp_path / 'good'}: process 1: custom_checkpoint_0.pkl does not fit")
        assert unchanged
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


def _ungathered() -> list[str]:
    quiet()
    accelerator = accelerator_of(deepspeed_plugin=plugin(3))
    loader(accelerator)
    model, _ = _prepared(accelerator)
    return [
        message_of(lambda: accelerator.get_state_dict(model)),
        message_of(lambda: accelerator.save_model(model, "nowhere")),
    ]


def test_sharded_weights_are_not_written_ungathered() -> None:
    for messages in run(_ungathered):
        assert len(messages) == 2
        assert all("only with DeepSpeedPlugin(zero3_save_16bit_model=True)" in message for message in messages)
