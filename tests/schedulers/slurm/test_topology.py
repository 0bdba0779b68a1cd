"""Where a node stands in a Slurm step: tables of environments, and a step made by hand on a real cluster."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accel.launch.errors import LaunchError
from accel.launch.plan import Launch
from schedulers.errors import SpecError
from schedulers.slurm.topology import from_slurm, port_of
from schedulers.topology import Topology
from tests.clusters.slurm import Slurm
from tests.launch.test_plan import planned


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


# As Slurm 22.05 sets them for `srun -N2 --ntasks-per-node=1` in a job of three nodes.
STEP = {
    "SLURM_JOB_ID": "123",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURMD_NODENAME": "n3",
    "SLURM_PROCID": "1",
}
ALONE = {"SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n1"}


def test_a_step() -> None:
    found = Topology.from_env(STEP)
    assert (found.node_rank, found.nodes, found.master, found.attempt) == (1, 2, "n2", 0)
    assert (found.port, found.names, found.source) == (20123, ("n2", "n3"), "step 0 of Slurm job 123")


@pytest.mark.parametrize(
    ("changed", "rank", "nodes", "master", "attempt"),
    [
        ({"SLURM_RESTART_COUNT": "2"}, 1, 2, "n2", 2),
        ({"SLURMD_NODENAME": "n2"}, 0, 2, "n2", 0),
        ({"SLURMD_NODENAME": "elsewhere"}, 1, 2, "n2", 0),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,1"}, 1, 2, "n2", 0),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}, 0, 1, "127.0.0.1", 0),
        ({"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_PTY_PORT": "1"}, 0, 1, "127.0.0.1", 0),
    ],
)  # fmt: skip
def test_steps(changed: dict[str, str], rank: int, nodes: int, master: str, attempt: int) -> None:
    found = from_slurm({**STEP, **changed})
    assert (found.node_rank, found.nodes, found.master, found.attempt) == (rank, nodes, master, attempt)


@pytest.mark.parametrize("special", [None, "4294967291", "4294967290", "4294967292", "4294967294", "4294967295"])
def test_what_is_no_step(special: str | None) -> None:
    """Batch scripts, interactive shells: one node is itself, and several are not guessed."""
    step = {} if special is None else {"SLURM_STEP_ID": special}
    alone = from_slurm({**ALONE, **step})
    assert (alone.node_rank, alone.nodes, alone.port, alone.source) == (0, 1, None, "")
    with pytest.raises(SpecError) as refused:
        from_slurm({**ALONE, **step, "SLURM_JOB_NUM_NODES": "3"})
    assert "SLURM_JOB_NUM_NODES" in str(refused.value)
    assert "srun --ntasks-per-node=1 accel launch" in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, ["SLURM_STEP_TASKS_PER_NODE=4(x2)", "--ntasks-per-node=1", "8"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, ["SLURM_STEP_TASKS_PER_NODE=2,1", "--ntasks-per-node=1"]),
        ({"SLURM_STEP_TASKS_PER_NODE": "x"}, ["SLURM_STEP_TASKS_PER_NODE", "'x'"]),
        ({"SLURM_STEP_NUM_NODES": "two"}, ["SLURM_STEP_NUM_NODES", "'two'"]),
        ({"SLURM_STEP_ID": "x"}, ["SLURM_STEP_ID", "'x'"]),
        ({"SLURM_STEP_NODELIST": "n[2-4]"}, ["SLURM_STEP_NODELIST=n[2-4]", "3", "SLURM_STEP_NUM_NODES is 2"]),
        ({"SLURM_STEP_NODELIST": "n[2-"}, ["n[2-"]),
        ({"SLURM_RESTART_COUNT": ""}, ["SLURM_RESTART_COUNT"]),
    ],
)
def test_refusals(changed: dict[str, str], said: list[str]) -> None:
    with pytest.raises(SpecError) as refused:
        from_slurm({**STEP, **changed})
    text = str(refused.value)
    assert all(word in text for word in said), text
    assert "\n" not in text


def test_old_slurms_say_less() -> None:
    old = {key: value for key, value in STEP.items() if not key.startswith("SLURM_STEP_N") and "TASKS_PER" not in key}
    assert from_slurm({**old, "SLURM_JOB_NODELIST": "n[2-3]"}).names == ("n2", "n3")
    with pytest.raises(SpecError, match="SLURM_STEP_NUM_TASKS=8 on 2 nodes"):
        from_slurm({**old, "SLURM_NTASKS": "8"})


def test_ports_of_jobs_and_steps_differ() -> None:
    ports = {port_of(job, step) for job in range(5000, 5050) for step in range(3)}
    assert len(ports) == 150
    assert all(20000 <= port < 32000 for port in ports)


def test_variables_go_there_and_back() -> None:
    found = Topology(node_rank=1, nodes=2, master="n2", attempt=3, port=20123, names=("n2", "n3"))
    again = replace(found, source="the job's environment (ACCEL_NODES)")
    assert Topology.from_env(found.environment()) == again
    assert Topology.from_env({**STEP, **found.environment()}) == again  # what accel itself has set goes first


def test_accel_launch_in_a_step() -> None:
    run = planned("--num_processes", "4", **STEP)
    assert (run.nodes, run.node_rank, run.address, run.port) == (2, 1, "n2", 20123)
    assert (run.processes, run.node_names, run.first_attempt) == (2, ("n2", "n3"), 0)
    other = planned("--num_processes", "4", "--main_process_ip", "ib-n2", "--main_process_port", "1234", **STEP)
    assert (other.address, other.port) == ("ib-n2", 1234)


def flags(machines: str, rank: str) -> tuple[str, ...]:
    return "--num_machines", machines, "--machine_rank", rank, "--main_process_ip", "n2", "--num_processes", machines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (flags("3", "1"), ["--num_machines 3", "step 0 of Slurm job 123", "2 nodes"]),
        (("--num_machines", "1"), ["--num_machines 1", "step 0 of Slurm job 123", "2 nodes", "srun --nodes=1"]),
        (flags("2", "0"), ["--machine_rank 0", "step 0 of Slurm job 123", "node 1"]),
    ],
)
def test_flags_that_contradict_the_step(given: tuple[str, ...], said: list[str]) -> None:
    with pytest.raises(LaunchError) as refused:
        planned(*given, **STEP)
    assert all(word in str(refused.value) for word in said), refused.value


def test_flags_that_fill_in_what_slurm_leaves_open() -> None:
    same: Launch = planned(*flags("2", "1"), **STEP)
    assert (same.nodes, same.node_rank, same.port) == (2, 1, 29500)
    one_node = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert planned(*flags("2", "0"), **one_node).nodes == 2  # a step for each machine, say
    several = {**ALONE, "SLURM_JOB_NUM_NODES": "3"}
    assert planned(*flags("2", "0"), **several).nodes == 2
    with pytest.raises(LaunchError, match="SLURM_JOB_NUM_NODES"):
        planned(**several)


def test_a_launch_inside_a_rank_is_one_of_its_own() -> None:
    run = planned("--num_processes", "2", **STEP, ACCEL_LAUNCH_ID="x", ACCEL_LAUNCH_EVENTS="/elsewhere")
    assert (run.nodes, run.processes, run.events) == (1, 2, None)


def test_a_step_made_by_hand(slurm: Slurm, tmp_path: Path) -> None:
    """Two of a job's three nodes: names and ranks are the step's."""
    script = tmp_path / "batch.sh"
    program = 'echo "$RANK $WORLD_SIZE $SLURMD_NODENAME $MASTER_ADDR"'
    launch = f"{sys.executable} -m accel launch --num_processes 2 --no_python sh -c '{program}'"
    step = "srun -N2 -n2 --ntasks-per-node=1 -w n2,n3 -o step-%n.txt"
    script.write_text(f"#!/bin/bash\n{launch} 2>alone.txt\n{step} {launch}\necho $? >code\n")
    words = ["sbatch", "--wait", "-N3", "--ntasks-per-node=1", "-w", "n[1-3]", "-o", "batch.txt", str(script)]
    env = {"PYTHONPATH": str(Path(__file__).parents[3])}
    slurm.run(words, cwd=tmp_path, env=env, timeout_s=200, check=False)
    assert (tmp_path / "code").read_text() == "0\n"
    first, second = ((tmp_path / f"step-{node}.txt").read_text() for node in (0, 1))
    assert "accel launch: 2 nodes, node 0 at n2:20" in first
    assert ", from step 0 of Slurm job" in first
    assert "0 2 n2 n2\n" in first
    assert second == "1 2 n3 n2\n"
    alone = (tmp_path / "alone.txt").read_text()
    assert "SLURM_JOB_NUM_NODES" in alone
    assert alone.count("\n") == 1


def test_reading_a_step_costs_nothing_where_there_is_none() -> None:
    code = "import sys, accel.launch.plan; print([name for name in sys.modules if name.startswith('schedulers.slurm')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
