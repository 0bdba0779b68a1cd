"""The process environment: what launchers of other kinds say, and the helpers that read and change it."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from accel.errors import ArgumentError, WorldError
from accel.state import PartialState
from accel.world.environment import (
    World,
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    read_world,
    str_to_bool,
    torchrun_variables,
)

from ..worlds import free_port, outcomes, run_one


def _mpi(names: tuple[str, ...], *values: int) -> dict[str, str]:
    return {name: str(value) for name, value in zip(names, values, strict=False)}


OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
PMI = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MVAPICH = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE")


@pytest.mark.parametrize("names", [OPEN_MPI, PMI, MVAPICH])
def test_an_mpi_launcher_is_understood(names: tuple[str, ...]) -> None:
    world = read_world(_mpi(names, 1, 2, 1, 2))
    assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 2, 1, 2)
    assert (world.master_addr, world.master_port) == ("127.0.0.1", 29500)
    two_nodes = read_world({**_mpi(names, 3, 4, 1, 2), "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (two_nodes.rank, two_nodes.local_rank, two_nodes.master_addr, two_nodes.master_port) == (3, 1, "node0", 1234)
    assert read_world(_mpi(names, 0, 1)).size == 1


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            _mpi(OPEN_MPI, 3, 4, 1, 2),
            "OMPI_COMM_WORLD_SIZE=4 but MASTER_ADDR is not set and OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (_mpi(PMI, 1, 2), "PMI_SIZE=2 but MASTER_ADDR is not set and MPI_LOCALNRANKS does not say"),
        ({"PMI_RANK": "1"}, "PMI_RANK=1 is set but PMI_SIZE is not: PMI gives both"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 is set but OMPI_COMM_WORLD_RANK is not"),
        (_mpi(MVAPICH, 2, 2, 0, 2), "MV2_COMM_WORLD_RANK=2 is not below MV2_COMM_WORLD_SIZE=2"),
    ],
)
def test_half_an_mpi_world_is_refused(env: dict[str, str], said: str) -> None:
    with pytest.raises(WorldError) as caught:
        read_world(env)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
        {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "0"},
        {"PALS_LOCAL_SIZE": "2", "PALS_RANKID": "0"},
        {"PALS_LOCAL_SIZE": "1", "PALS_RANKID": "1"},
        {"PMIX_RANK": "1"},
    ],
)
def test_tasks_without_a_launcher_are_not_worlds_of_one(env: dict[str, str]) -> None:
    with pytest.raises(
        WorldError, match=r"^\w+=\d: this process is one of several tasks.*`accel launch`.*WORLD_SIZE=1"
    ):
        read_world(env)
    assert read_world({**env, "WORLD_SIZE": "1"}) == World()


@pytest.mark.parametrize(
    "env", [{"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, {"PMIX_RANK": "0"}, {"PALS_RANKID": "0"}]
)
def test_a_task_that_may_be_alone_is(env: dict[str, str]) -> None:
    assert read_world(env) == World()


def test_torchruns_variables_come_before_mpis() -> None:
    """`mpirun` around `accel launch`: the nearer launcher made the world."""
    env = {**_mpi(OPEN_MPI, 1, 2, 1, 2), "WORLD_SIZE": "1", "RANK": "0"}
    assert read_world(env).size == 1


def test_a_world_in_torchruns_variables_reads_back() -> None:
    world = read_world(_mpi(OPEN_MPI, 1, 2, 1, 2))
    assert read_world(torchrun_variables(world)) == world


def _sum_of_ranks() -> tuple[int, int, str | None, float]:
    state = PartialState()
    total = torch.tensor([state.process_index + 1.0])
    torch.distributed.all_reduce(total)
    return state.process_index, state.num_processes, os.environ.get("LOCAL_RANK"), total.item()


def test_ranks_of_mpi_form_one_world() -> None:
    """As `mpirun -n 2` starts them on a machine without a GPU: no variable of torchrun is set."""
    # The parent test process starts each rank with its own variables, so that each is told by MPI alone.
    import threading

    port = str(free_port())
    found: dict[int, Any] = {}

    def start(rank: int) -> None:
        env = {**_mpi(OPEN_MPI, rank, 2, rank, 2), "MASTER_PORT": port, "ACCELERATE_USE_CPU": "1"}
        found[rank] = outcomes(_sum_of_ranks, processes=1, env=env)[0]

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[rank].value for rank in range(2)] == [(0, 2, "0", 3.0), (1, 2, "1", 3.0)], found


def _device_with_use_cpu() -> tuple[str, bool]:
    state = PartialState()
    return str(state.device), state._cpu


def test_partial_state_honours_use_cpu() -> None:
    """Accelerate's defect 2: only `AcceleratorState` read the variable."""
    env = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": "meta"}  # `meta` stands for a device that is there
    assert run_one(_device_with_use_cpu, env=env) == ("cpu", True)


def test_patching_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_A", "before")
    monkeypatch.delenv("ACCEL_TEST_B", raising=False)
    seen = []

    def fail_inside() -> None:
        with patch_environment(accel_test_a=1, accel_test_b="x"):
            seen.append((os.environ["ACCEL_TEST_A"], os.environ["ACCEL_TEST_B"]))
            raise KeyError("in the middle")

    with pytest.raises(KeyError):
        fail_inside()
    assert seen == [("1", "x")]
    assert os.environ["ACCEL_TEST_A"] == "before"
    assert "ACCEL_TEST_B" not in os.environ


def test_clearing_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_A", "before")
    before = dict(os.environ)
    with clear_environment():
        assert dict(os.environ) == {}
        os.environ["ACCEL_TEST_A"] = "inside"
        os.environ["ACCEL_TEST_C"] = "inside"
    assert dict(os.environ) == before


def _leave_a_mess() -> str:
    os.environ["ACCELERATE_ADDED"] = "1"
    os.environ["ACCELERATE_KEPT"] = "changed"
    os.environ.pop("ACCELERATE_REMOVED", None)
    return "done"


def test_purging_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_KEPT", "before")
    monkeypatch.setenv("ACCELERATE_REMOVED", "before")

    @purge_accelerate_environment
    class Tests:
        def test_one(self) -> str:
            return _leave_a_mess()

        def other(self) -> None:
            os.environ["ACCELERATE_OTHER"] = "1"

    class More(Tests):
        def test_two(self) -> str:
            return _leave_a_mess()

    def seen() -> tuple[str | None, ...]:
        return tuple(os.environ.get(f"ACCELERATE_{name}") for name in ("ADDED", "KEPT", "REMOVED"))

    for call in (purge_accelerate_environment(_leave_a_mess), Tests().test_one, More().test_two):
        assert call() == "done"
        assert seen() == (None, "before", "before")
    Tests().other()
    assert os.environ.pop("ACCELERATE_OTHER") == "1"


@pytest.mark.parametrize(("word", "value"), [("yes", 1), ("T", 1), ("1", 1), ("off", 0), ("False", 0), ("n", 0)])
def test_words_for_yes_and_no(word: str, value: int) -> None:
    assert str_to_bool(word) == value
    assert str_to_bool(word, to_bool=True) is bool(value)


@pytest.mark.parametrize("word", ["", "maybe", "2"])
def test_a_word_that_is_neither_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is neither yes nor no: use 1 or 0"):
        str_to_bool(word)


def test_reading_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_TEST_N", "-1")
    monkeypatch.setenv("ACCEL_TEST_M", "7")
    monkeypatch.setenv("ACCEL_TEST_FLAG", "on")
    monkeypatch.setenv("ACCEL_TEST_BAD", "seven")
    assert get_int_from_env(["ACCEL_TEST_NONE", "ACCEL_TEST_N", "ACCEL_TEST_M"], 3) == 7
    assert get_int_from_env(["ACCEL_TEST_NONE"], 3) == 3
    with pytest.raises(ArgumentError, match="environment variable ACCEL_TEST_BAD='seven' is not a whole number"):
        get_int_from_env(["ACCEL_TEST_BAD"], 3)
    assert parse_flag_from_env("ACCEL_TEST_FLAG") is True
    assert parse_flag_from_env("ACCEL_TEST_NONE", default=True) is True
    assert parse_choice_from_env("ACCEL_TEST_FLAG") == "on"
    assert parse_choice_from_env("ACCEL_TEST_NONE") == "no"


def test_lines_for_a_shell(caplog: pytest.LogCaptureFixture) -> None:
    lines = convert_dict_to_env_variables({"A": "1", "B": "two words", "C": "", "D": "x;y", "E": "a=b"})
    assert lines == ["A=1\n", "E=a=b\n"]
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == ["B", "C", "D"]


def test_libraries_that_were_imported() -> None:
    assert are_libraries_initialized("torch", "no_such_library") == ["torch"]
    assert "no_such_library" not in sys.modules
