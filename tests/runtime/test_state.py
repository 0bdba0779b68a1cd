"""Which process, device and world: from the environment, or a clear refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from accel.enums import DistributedType
from accel.errors import AccelError, ArgumentError, WorldError
from accel.state import AcceleratorState, PartialState
from accel.world.environment import read_flag, read_world
from accel.world.split import share_of
from tests.marks import long

from .worlds import clean_env, free_port, outcomes, run, run_one, world_env

MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 but RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE=2 but MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", **MASTER}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE='two' is not a whole number"),
        ({"WORLD_SIZE": "0"}, "environment variable WORLD_SIZE=0 is less than 1"),
        ({"RANK": "1"}, "RANK=1 is set but WORLD_SIZE is not"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", **MASTER}, "LOCAL_RANK not set"),
        (
            {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2", **MASTER},
            "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2",
        ),
    ],
)
def test_half_a_world_is_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(WorldError) as caught:
        read_world(env)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_worlds_that_are_whole() -> None:
    assert read_world({}).size == 1
    assert read_world({"RANK": "0", "WORLD_SIZE": "1"}).rank == 0
    world = read_world({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **MASTER})
    assert (world.rank, world.size, world.local_rank, world.local_size, world.master_port) == (3, 4, 1, 2, 29500)


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("yes", True), ("0", False), ("", False), ("OFF", False)]
)
def test_flags(text: str, value: bool) -> None:
    assert read_flag({"X": text}, "X") is value


def test_a_flag_that_is_neither_is_refused() -> None:
    with pytest.raises(ArgumentError, match="environment variable X='maybe' is neither yes nor no"):
        read_flag({"X": "maybe"}, "X")


def _describe() -> dict[str, Any]:
    state = PartialState()
    again = AcceleratorState()
    return {
        "rank": state.process_index,
        "size": state.num_processes,
        "local": again.local_process_index,
        "type": str(state.distributed_type),
        "main": (state.is_main_process, state.is_local_main_process, state.is_last_process),
        "device": str(again.device),
        "backend": state.backend,
        "initialized": torch.distributed.is_initialized(),
    }


def test_ranks_form_one_world_without_any_flag() -> None:
    """Accelerate's defects 1 and 2: N ranks on a CPU machine became N worlds of one."""
    seen = run(_describe, processes=3)
    assert [one["rank"] for one in seen] == [0, 1, 2]
    assert {one["size"] for one in seen} == {3}
    assert {one["type"] for one in seen} == {"MULTI_CPU"}
    assert {one["backend"] for one in seen} == {"gloo"}
    assert [one["main"] for one in seen] == [(True, True, False), (False, False, False), (False, False, True)]


def test_one_process_forms_no_group() -> None:
    seen = run_one(_describe, env={"ACCELERATE_USE_CPU": "1"})
    assert (seen["size"], seen["type"], seen["backend"], seen["initialized"]) == (1, "NO", None, False)
    assert seen["device"] == "cpu"


def _adopted() -> tuple[int, int, str]:
    torch.distributed.init_process_group("gloo")
    state = PartialState()
    result = (state.process_index, state.num_processes, str(state.distributed_type))
    state.wait_for_everyone()  # one that leaves while the other is still connecting would be taken for a crash
    torch.distributed.destroy_process_group()
    return result


def test_a_world_that_the_script_formed_is_joined() -> None:
    assert run(_adopted, env={"ACCELERATE_USE_CPU": "1"}) == [(0, 2, "MULTI_CPU"), (1, 2, "MULTI_CPU")]


def _state() -> str:
    return repr(PartialState())


def test_an_unreachable_world_is_refused_not_replaced() -> None:
    env = {**world_env(1, 2, free_port()), "ACCELERATE_USE_CPU": "1"}
    ended = outcomes(_late, processes=1, env=env)[0]
    assert ended.error == "WorldError"
    assert f"rank 1 of 2 could not join the world at 127.0.0.1:{env['MASTER_PORT']} over gloo" in ended.message


def _late() -> None:
    from datetime import timedelta

    PartialState(timeout=timedelta(seconds=1))


@pytest.mark.gpu
def test_more_ranks_than_devices_is_refused() -> None:
    beyond = str(torch.cuda.device_count())
    ended = outcomes(_state, processes=1, env={"LOCAL_RANK": beyond})[0]
    assert "has no device of its own" in ended.message


def _errors() -> list[str]:
    told = []
    for action in (
        lambda: PartialState(tiemout=3),
        lambda: AcceleratorState("bf61"),
        lambda: (AcceleratorState("no"), AcceleratorState("bf16")),
        lambda: PartialState().proces_index,
    ):
        try:
            action()
        except (AccelError, AttributeError) as error:
            told.append(str(error))
    return told


def test_errors_are_one_line_with_the_nearest_name() -> None:
    assert run_one(_errors) == [
        "PartialState(tiemout=…) is unknown; did you mean 'timeout'?",
        "mixed_precision: 'bf61' is not one of no, fp8, fp16, bf16; did you mean 'bf16'?",
        "mixed_precision='bf16': this process already uses 'no': pass it to the first Accelerator or AcceleratorState",
        "PartialState has no attribute 'proces_index'; did you mean 'process_index'?",
    ]


def _precision_from_env() -> str:
    return AcceleratorState().mixed_precision


def test_precision_comes_from_the_environment_and_is_checked() -> None:
    assert run_one(_precision_from_env, env={"ACCELERATE_MIXED_PRECISION": "bf16"}) == "bf16"
    ended = outcomes(_precision_from_env, processes=1, env={"ACCELERATE_MIXED_PRECISION": "half"})[0]
    assert ended.message == "environment variable ACCELERATE_MIXED_PRECISION: 'half' is not one of no, fp8, fp16, bf16"


def _decorated() -> list[Any]:
    state = PartialState()
    seen: list[Any] = []
    state.on_main_process(seen.append)("main")
    state.on_main_process()(seen.append)("main too")
    state.on_last_process(seen.append)("last")
    state.on_process(seen.append, process_index=1)("one")
    state.on_process(process_index=0)(seen.append)("zero")
    state.on_local_main_process(seen.append)("local main")
    state.on_local_process(seen.append, local_process_index=1)("local one")
    with state.split_between_processes(list("abcde")) as mine:
        seen.append(mine)
    with state.split_between_processes({"x": torch.arange(3), "y": [1, 2, 3]}, apply_padding=True) as named:
        seen.append({"x": named["x"].tolist(), "y": named["y"]})
    return seen


def test_decorators_and_splitting() -> None:
    main, other = run(_decorated)
    padded = [{"x": [0, 1], "y": [1, 2]}, {"x": [2, 2], "y": [3, 3]}]
    assert main == ["main", "main too", "zero", "local main", ["a", "b", "c"], padded[0]]
    assert other == ["last", "one", "local one", ["d", "e"], padded[1]]


@pytest.mark.parametrize("padded", [True, False])
def test_a_text_is_whole_for_every_process(padded: bool) -> None:
    texts = {"positive": "a cat", "negative": b"dogs", "seeds": [1, 2]}
    assert [share_of("a photo", index, 2, padded) for index in range(2)] == ["a photo", "a photo"]
    assert [share_of(texts, index, 2, padded) for index in range(2)] == [
        {**texts, "seeds": [1]},
        {**texts, "seeds": [2]},
    ]


@pytest.mark.parametrize(("items", "parts"), [([], 3), ([1], 3), ([1, 2, 3, 4], 3), ((1, 2, 3), 2)])
def test_padded_shares_are_of_one_length(items: Any, parts: int) -> None:
    shares = [share_of(items, index, parts, True) for index in range(parts)]
    assert len({len(share) for share in shares}) == 1
    assert all(type(share) is type(items) for share in shares)


def test_splitting_refuses_what_has_no_length() -> None:
    with pytest.raises(ArgumentError, match="cannot split a int"):
        share_of(3, 0, 2, False)
    with pytest.raises(ArgumentError, match="needs values of one length"):
        share_of({"a": [1], "b": [1, 2]}, 0, 2, False)


def _first(directory: str) -> list[str]:
    state = PartialState()
    path = os.path.join(directory, "cache")
    with state.main_process_first():
        found = os.path.exists(path)
        if not found:
            with open(path, "w") as file:
                file.write(str(state.process_index))
    with open(path) as file:
        return [str(found), file.read()]


def test_main_process_first(tmp_path: Any) -> None:
    assert run(_first, str(tmp_path)) == [["False", "0"], ["True", "0"]]


SCRIPT = """
import sys, torch
from accel import Accelerator
from accel.collectives import all_objects


sys.setswitchinterval(5)  # whoever waits for the interpreter's lock has to wait until it is given up

def main():
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0))
    accelerator.print("sum", total.item())
    all_objects("the last collective")
    if "end" in sys.argv:
        accelerator.end_training()
    return model

if "global" in sys.argv:
    model = main()
else:
    main()
"""


@pytest.mark.parametrize("how", [[], *long(["end"], ["global"], ["end", "global"])])
def test_a_script_ends_without_a_word_on_stderr(tmp_path: Any, how: list[str]) -> None:
    """And it ends: torch's reducers hang when they are the last to let go of a gloo group."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), *how],
            env=clean_env(**world_env(rank, 2, port), PYTHONPATH=os.getcwd()),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in running]
    assert ended == [("sum 3.0\n", "", 0), ("", "", 0)]


def test_distributed_types_are_words() -> None:
    assert DistributedType.NO == "NO"
    assert f"{DistributedType.MULTI_CPU}" == "MULTI_CPU"
