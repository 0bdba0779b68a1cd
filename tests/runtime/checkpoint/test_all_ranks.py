"""Calls that only some processes make, and hooks that fail on one: an error on all, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from accel import Accelerator
from accel.checkpoint import all_ranks
from accel.checkpoint.manifest import find_damage
from accel.errors import ArgumentError, CheckpointError, CollectiveError
from accel.plugins.fsdp import FullyShardedDataParallelPlugin

from ..small import simple
from ..worlds import outcomes, run


def _prepared(layout: str) -> tuple[Any, Any]:
    plugin = FullyShardedDataParallelPlugin(state_dict_type=layout) if layout else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    accelerator.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()
    return accelerator, model


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _by_some(directory: str) -> list[Any]:
    """Each call by the processes 0 and 2, then by process 1 alone, then by all."""
    all_ranks._ROLL_CALL = timedelta(seconds=0.1)
    accelerator, model = _prepared("SHARDED_STATE_DICT")
    place, rank, told = f"{directory}/kept", accelerator.process_index, []
    calls: dict[str, Callable[[], Any]] = {
        "save_state": lambda: accelerator.save_state(place),
        "load_state": lambda: accelerator.load_state(place),
        "save_model": lambda: accelerator.save_model(model, f"{directory}/model"),
    }
    for name, call in calls.items():
        number = next(all_ranks._calls)
        all_ranks._calls = iter(range(number, 1000))  # type: ignore[assignment]
        if rank == 0:
            _store().wait([f"accel/call/{number}/{name}/2"])  # it waits for the main process as long as it must
            time.sleep(0.3)
        if rank == 1:
            _store().wait([f"test/{name}"])
        try:
            call()
        except CollectiveError as error:
            told.append(str(error))
        if rank == 0:
            _store().set(f"test/{name}", "")
            all_ranks._ROLL_CALL = timedelta(seconds=60)
        call()
        all_ranks._ROLL_CALL = timedelta(seconds=0.1)
    return told


def test_who_is_missing_is_named_on_all_that_come(tmp_path: Path) -> None:
    told = run(_by_some, str(tmp_path), processes=3)
    assert told[0] == told[1] == told[2]
    for name, message in zip(("save_state", "load_state", "save_model"), told[0], strict=True):
        assert message == (
            f"every process must call {name}, but process 1 did not within 0 s: call it outside of code for one "
            "process, and wait_for_everyone() before it if processes arrive far apart"
        )
    assert find_damage(tmp_path / "kept") is None


def _different(directory: str) -> None:
    accelerator, _, _, _ = simple()
    all_ranks._ROLL_CALL = timedelta(seconds=0.1)
    if accelerator.is_main_process:
        accelerator.save_state(f"{directory}/kept")
    else:
        accelerator.load_state(f"{directory}/kept")


def test_two_different_calls_are_not_one(tmp_path: Path) -> None:
    for ended in outcomes(_different, str(tmp_path)):
        assert ended.error == "CollectiveError"
        assert "every process must call " in ended.message
        assert "but process 1 did not" in ended.message


def _without_the_main_process(directory: str) -> str:
    accelerator, _, _, _ = simple()
    told = ""
    if not accelerator.is_main_process:
        _store().set_timeout(timedelta(seconds=0.1))  # the group's
        with pytest.raises(CollectiveError) as raised:
            accelerator.save_state(directory)
        told = str(raised.value)
        _store().set_timeout(timedelta(seconds=60))
    accelerator.wait_for_everyone()
    return told


def test_the_main_process_is_waited_for_up_to_the_groups_timeout(tmp_path: Path) -> None:
    said = run(_without_the_main_process, str(tmp_path / "kept"))[1]
    assert said.startswith("every process must call save_state, but the main process did not: ")


def _keys(directory: str) -> list[int]:
    accelerator, _, _, _ = simple()
    counts = []
    for _ in range(3):
        accelerator.save_state(directory)
        accelerator.wait_for_everyone()
        counts.append(_store().num_keys())
        accelerator.wait_for_everyone()
    return counts


def test_nothing_piles_up_in_the_store(tmp_path: Path) -> None:
    for _, second, third in run(_keys, str(tmp_path / "kept")):
        assert second == third


def _model_by_one(directory: str) -> list[str]:
    accelerator, model, _, _ = simple()
    told: list[str] = []
    if accelerator.is_main_process:
        accelerator.save_model(model, f"{directory}/model")
        Path(directory, "model", ".model.safetensors.draft").mkdir()
        for folder, size in (("file", 10), ("other", "many"), ("model", "10GB")):
            with pytest.raises((ArgumentError, CheckpointError)) as raised:
                accelerator.save_model(model, f"{directory}/{folder}", size)
            told.append(f"{type(raised.value).__name__}: {raised.value}")
    return told


def test_a_model_that_is_not_sharded_may_be_saved_by_the_main_process_alone(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told, others = run(_model_by_one, str(tmp_path))
    assert others == []
    assert set(load_file(tmp_path / "model/model.safetensors")) == {"weight", "bias"}
    assert told[:2] == [
        f"ArgumentError: save_model: {tmp_path}/file must be a directory, but is a file",
        "ArgumentError: max_shard_size='many': use a number of bytes, or digits and a unit such as '5GB'",
    ]
    assert told[2].startswith(f"CheckpointError: saving {tmp_path}/model: IsADirectoryError: ")


def _fails(*_: Any) -> None:
    raise ValueError("a hook's own")


def _hooks(directory: str, layout: str) -> list[str]:
    accelerator, _ = _prepared(layout)
    told = []
    for register, call in (
        (accelerator.register_save_state_pre_hook, accelerator.save_state),
        (accelerator.register_load_state_pre_hook, accelerator.load_state),
    ):
        handle = register(_fails) if accelerator.process_index == 1 else None
        with pytest.raises(CheckpointError) as raised:
            call(directory)
        told.append(str(raised.value))
        if handle is not None:
            handle.remove()
        call(directory)
    return told


@pytest.mark.parametrize("layout", ["", "FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_hook_that_fails_on_one_process_fails_on_all(tmp_path: Path, layout: str) -> None:
    place = tmp_path / "kept"
    failed = f"{place}: process 1: ValueError: a hook's own"
    assert run(_hooks, str(place), layout) == [[f"saving {failed}", f"loading {failed}"]] * 2
    assert find_damage(place) is None
