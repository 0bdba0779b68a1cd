"""`plan`: what the flags mean on a machine, and every refusal with its remedy."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import pytest

import accel.launch.plan
from accel.launch import machines
from accel.launch.devices import Devices, only_cpu, visible
from accel.launch.errors import LaunchConfigError, LaunchError
from accel.launch.flags import add_arguments
from accel.launch.plan import Launch, plan
from accel.launch.tee import parse
from accel.launch.worker import Program
from schedulers.kubernetes.logs.cursor import LAUNCH_LINE

UUIDS = ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four."""

    def find(env: dict[str, str]) -> Devices:
        ids = visible(env.get("CUDA_VISIBLE_DEVICES"), UUIDS)
        return Devices(kind="cuda", ids=tuple(ids), cpus=16) if ids else only_cpu()

    monkeypatch.setattr(accel.launch.plan, "find", find)


def planned(*flags: str, **env: str) -> Launch:
    return planned_of(Program(argv=["train.py"], entry="script"), *flags, **env)


def planned_of(program: Program, *flags: str, **env: str) -> Launch:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options: dict[str, Any] = vars(parser.parse_args(flags))
    return plan(options, program, env)


MANY = ("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "node0")


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (("--cpu", "--multi_gpu"), {}, ["--cpu", "--multi_gpu", "keep one"]),
        (("--multi_gpu",), {}, ["--multi_gpu", "no GPU", "nvidia-smi"]),
        (("--gpu_ids", "0"), {}, ["--gpu_ids 0", "no GPU"]),
        ((*MANY, "--num_processes", "3"), {}, ["--num_processes 3", "not divisible", "machines (2)"]),
        (("--num_processes", "3", "--num_machines", "2"), {}, ["--num_processes 3 is not divisible by"]),
        (("--num_machines", "two"), {}, ["--num_machines", "'two'", "MIN:MAX"]),
        (("--num_machines", "²"), {}, ["--num_machines", "'²'"]),
        (("--num_machines", "0"), {}, ["--num_machines", "from 1"]),
        (("--num_machines", "3:2"), {}, ["--num_machines", "'3:2'"]),
        (("--num_machines", "1:2", "--main_process_ip", "x"), {}, ["MIN:MAX", "--rdzv_backend c10d"]),
        (("--num_machines", "2"), {}, ["--machine_rank", "--main_process_ip"]),
        (("--num_machines", "2", "--machine_rank", "0"), {}, ["need --main_process_ip"]),
        (("--num_machines", "2", "--main_process_ip", "x"), {}, ["need --machine_rank"]),
        (("--num_machines", "1:2", "--rdzv_backend", "c10d"), {}, ["--main_process_ip"]),
        (("--num_machines", "2", "--machine_rank", "2", "--main_process_ip", "x"), {}, ["--machine_rank 2", "0 … 1"]),
        (("--num_machines", "1", "--machine_rank", "1"), {}, ["--machine_rank 1", "0 … 0"]),
        (("--machine_rank", "0"), {}, ["--machine_rank 0", "--num_machines"]),
        ((*MANY, "--main_process_port", "0"), {}, ["--main_process_port 0", "choose one"]),
        (("--main_process_port", "65536"), {}, ["--main_process_port 65536", "65535"]),
        (("--rdzv_conf", "timeout"), {}, ["--rdzv_conf", "key=value", "'timeout'"]),
        (("--rdzv_conf", "=3"), {}, ["--rdzv_conf", "key=value"]),
        (("--tee", "4"), {}, ["--tee", "'4'", "0 to 3"]),
        (("--tee", "x"), {}, ["--tee", "'x'"]),
        (("--tee", "0:3,1"), {}, ["--tee", "'0:3,1'"]),
        ((), {"ACCEL_NODE_RANK": "0"}, ["ACCEL_NODES"]),
        ((), {"ACCEL_NODE_RANK": "x", "ACCEL_NODES": "2", "ACCEL_MASTER": "m"}, ["ACCEL_NODE_RANK", "'x'"]),
        ((), {"ACCEL_NODE_RANK": "2", "ACCEL_NODES": "2", "ACCEL_MASTER": "m"}, ["2", "0 … 1"]),
        ((), {"ACCEL_NODE_RANK": "0", "ACCEL_NODES": "2"}, ["address"]),
    ],
)
def test_refusals(flags: tuple[str, ...], env: dict[str, str], said: list[str]) -> None:
    with pytest.raises(LaunchError) as refused:
        planned(*flags, **env)
    text = str(refused.value)
    assert all(word in text for word in said), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (("--num_processes", "5"), {}, ["5 processes", "4 visible GPUs", "--cpu"]),
        (("--num_processes", "2"), {"CUDA_VISIBLE_DEVICES": "3"}, ["2 processes", "1 visible GPU:"]),
        (("--gpu_ids", "4"), {}, ["--gpu_ids 4", "0 … 3"]),
        (("--gpu_ids", "0,0"), {}, ["--gpu_ids 0,0", "once"]),
        (("--gpu_ids", "0,x"), {}, ["--gpu_ids 0,x"]),
        (("--gpu_ids", "0,1", "--num_processes", "3"), {}, ["3 processes", "2 visible"]),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_refusals_with_gpus(flags: tuple[str, ...], env: dict[str, str], said: list[str]) -> None:
    with pytest.raises(LaunchError) as refused:
        planned(*flags, **env)
    assert all(word in str(refused.value) for word in said), refused.value


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(LaunchError, match=r"no script at .*/trian.py: it does not exist; did you mean 'train.py'\?"):
        planned_of(Program(argv=["trian.py"], entry="script"))
    with pytest.raises(LaunchError, match="command 'no-such-command' not found on PATH"):
        planned_of(Program(argv=["no-such-command"], entry="command"))


@pytest.mark.parametrize(
    "flags",
    [
        ("--shutdown_timeout", "-1"),
        ("--shutdown_timeout", "nan"),
        ("--monitor_interval", "inf"),
        ("--num_processes", "-2"),
    ],
)
def test_numbers_that_mean_nothing(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planned(*flags)
    assert flags[0] in capsys.readouterr().err


def test_one_process_where_there_is_no_gpu() -> None:
    run = planned()
    assert (run.processes, run.nodes, run.node_rank, run.address, run.port) == (1, 1, 0, "127.0.0.1", 0)
    assert run.is_single_process
    assert run.env["ACCELERATE_USE_CPU"] == "true"
    assert "OMP_NUM_THREADS" not in run.env
    assert not planned("--max_restarts", "1").is_single_process
    assert not planned("--num_processes", "2").is_single_process
    assert not planned("--rdzv_backend", "c10d").is_single_process


@pytest.mark.usefixtures("gpus")
def test_one_process_a_gpu() -> None:
    assert planned().processes == 4
    assert planned(CUDA_VISIBLE_DEVICES="2,3").processes == 2
    assert planned("--cpu").processes == 1
    run = planned("--gpu_ids", "3,1", "--multi_gpu")
    assert (run.processes, run.env["CUDA_VISIBLE_DEVICES"]) == (2, "3,1")
    assert "ACCELERATE_USE_CPU" not in run.env
    assert "CUDA_VISIBLE_DEVICES" not in planned("--gpu_ids", "all").env
    assert planned("--num_processes", "3", "--cpu").processes == 3


def test_processes_are_counted_over_all_machines() -> None:
    run = planned(*MANY, "--num_processes", "6")
    assert (run.processes, run.nodes, run.node_rank, run.address, run.port) == (3, 2, 1, "node0", 29500)
    assert not planned(*MANY, "--num_processes", "2").is_single_process


def test_elastic_machines() -> None:
    run = planned("--num_machines", "1:4", "--rdzv_backend", "c10d", "--main_process_ip", "h", "--num_processes", "2")
    assert (run.nodes, run.max_nodes, run.processes, run.node_rank) == (1, 4, 2, 0)


def test_the_schedulers_topology() -> None:
    env = {"ACCEL_NODE_RANK": "3", "ACCEL_NODES": "4", "ACCEL_MASTER": "head", "ACCEL_JOB_ID": "j1"}
    run = planned("--num_processes", "8", **env)
    assert (run.node_rank, run.nodes, run.address, run.processes, run.run_id) == (3, 4, "head", 2, "j1")
    assert planned("--main_process_ip", "other", **env).address == "other"
    assert run.start_message == ""  # by node 0 alone
    first = planned("--num_processes", "8", **{**env, "ACCEL_NODE_RANK": "0"})
    assert first.start_message == "4 nodes, node 0 at head:29500, from the job's environment (ACCEL_NODES)"
    assert planned(**{**env, "ACCEL_NODE_RANK": "0", "ACCEL_LAUNCH_EVENTS": "e"}).start_message == ""
    # A pod's log begins with the launcher's line on every node: else its beginning was rotated away.
    for pod in (env, {"ACCEL_JOB_ID": "j1"}):
        line = f"accel launch: {planned(**pod, KUBERNETES_SERVICE_HOST='10.0.0.1').start_message}"
        assert line == f"accel launch: started on {os.uname().nodename}"
        assert LAUNCH_LINE.match(line.encode())
    assert LAUNCH_LINE.match(f"accel launch: {first.start_message}".encode())


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1",
}  # fmt: skip
SCHEDULERS: dict[str, dict[str, str]] = {
    "step 0 of Slurm job 7": SLURM,
    "the training operator": {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-master-0"},
    "the manifest of the job": {"JOB_COMPLETION_INDEX": "1", "ACCEL_NODES": "2", "ACCEL_MASTER": "run-0.run"},
    "SageMaker": {"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"},
    "TPU_WORKER_HOSTNAMES": {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"},
    "the job's environment (ACCEL_NODES)": {
        "ACCEL_NODE_RANK": "1", "ACCEL_NODES": "2", "ACCEL_MASTER": "h0", "ACCEL_NODE_NAMES": "h0,h1",
    },
}  # fmt: skip


@pytest.mark.parametrize("source", SCHEDULERS)
def test_a_flag_that_contradicts_the_scheduler(source: str) -> None:
    env = SCHEDULERS[source]
    run = planned(**env)
    assert (run.nodes, run.node_rank, run.source) == (2, 1, source)
    refusals = {
        "--num_machines 3 --machine_rank 1 --main_process_ip x": ("--num_machines 3", "2 nodes"),
        "--num_machines 1": ("--num_machines 1", "2 nodes"),
        "--num_machines 2 --machine_rank 0 --main_process_ip x": ("--machine_rank 0", "this is node 1"),
        "--machine_rank 0": ("--machine_rank 0", "this is node 1"),
    }
    if run.node_names:
        other = run.node_names[1]
        refusals[f"--main_process_ip {other}"] = (f"--main_process_ip {other}", f"node 0 is {run.node_names[0]}")
    for flags, said in refusals.items():
        with pytest.raises(LaunchConfigError) as refused:
            planned(*flags.split(), **env)
        assert all(word in str(refused.value) for word in (*said, source, "leave the machine flags out")), refused.value
    agreed = planned("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "x", **env)
    assert (agreed.nodes, agreed.node_rank, agreed.address) == (2, 1, "x")
    assert planned("--machine_rank", "1", **env).nodes == 2


OPERATOR = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-master-0"}


@pytest.mark.parametrize(
    ("text", "flags", "processes"),
    [
        ("3", (), 3),
        ("3", ("--num_processes", "6"), 3),
        ("auto", (), 1),
        ("", (), 1),
        ("auto", ("--num_processes", "4"), 2),
    ],
)
def test_an_operator_sets_the_processes_of_a_node(text: str, flags: tuple[str, ...], processes: int) -> None:
    assert planned("--cpu", *flags, PET_NPROC_PER_NODE=text, **OPERATOR).processes == processes
    assert planned("--cpu", PET_NPROC_PER_NODE="cpu", **OPERATOR).processes == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        ((), {"PET_NPROC_PER_NODE": "two"}, ["PET_NPROC_PER_NODE='two'", "auto, gpu or cpu"]),
        (("--cpu",), {"PET_NPROC_PER_NODE": "gpu"}, ["PET_NPROC_PER_NODE=gpu", "no GPU"]),
        (("--cpu", "--num_processes", "2"), {"PET_NPROC_PER_NODE": "2"}, ["--num_processes 2", "4 in all"]),
        (("--cpu",), {"PET_MAX_RESTARTS": "3"}, ["PET_MAX_RESTARTS=3", "write --max_restarts 3"]),
        (("--cpu",), {"PET_STANDALONE": "1"}, ["PET_STANDALONE=1", "unset it"]),
    ],
)
def test_what_an_operator_sets_is_read_or_refused(flags: tuple[str, ...], env: dict[str, str], said: list[str]) -> None:
    with pytest.raises(LaunchConfigError) as refused:
        planned(*flags, **OPERATOR, **env)
    assert all(word in str(refused.value) for word in said), refused.value


MACHINES = "--num_machines 2 --machine_rank 0 --main_process_ip h"
# The variables of an elastic PyTorchJob without further settings.
ELASTIC = {
    "PET_NNODES": "2:8", "PET_NPROC_PER_NODE": "3",
    "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "run-worker-0:29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "env", "processes"),
    [
        ("", {"PET_NPROC_PER_NODE": "3"}, 3),
        ("", {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "1", "PET_NAME": "Rex"}, 3),
        (MACHINES, {"PET_NPROC_PER_NODE": "3", "PET_NNODES": "4"}, 3),
        (f"{MACHINES} --num_processes 4", {"PET_NPROC_PER_NODE": "3"}, 2),
        ("", {"PET_NPROC_PER_NODE": "3", "ACCEL_JOB_ID": "2mxaaaaaaaa"}, 1),
        ("--num_machines 2:8 --rdzv_backend c10d --main_process_ip h", ELASTIC, 3),
        (f"{MACHINES} --num_processes 4", ELASTIC, 2),
    ],
)
def test_variables_of_torchrun_without_an_operator(flags: str, env: dict[str, str], processes: int) -> None:
    assert planned("--cpu", *flags.split(), **env).processes == processes


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        ("--num_processes 2", {"PET_NPROC_PER_NODE": "3"}, "--num_processes 2 contradicts PET_NPROC_PER_NODE"),
        (
            "",
            {"PET_NNODES": "2"},
            "PET_NNODES=2, without PET_NODE_RANK: unset it, or write --num_machines 2 --machine_r",
        ),
        ("", {"PET_MAX_RESTARTS": "3"}, "PET_MAX_RESTARTS=3 is torchrun's, and is not read: write --max_restarts 3"),
        (MACHINES, {"PET_MAX_RESTARTS": "3"}, "PET_MAX_RESTARTS=3 is torchrun's, and is not read: write --max_res"),
        (f"{MACHINES} --num_processes 4", {**ELASTIC, "PET_RDZV_ID": "7"}, "PET_RDZV_ID=7 is torchrun's, and is not"),
    ],
)
def test_variables_of_torchrun_that_are_refused(flags: str, env: dict[str, str], said: str) -> None:
    with pytest.raises(LaunchConfigError, match=re.escape(said)):
        planned("--cpu", *flags.split(), **env)


def test_every_variable_of_torchrun_is_read_or_refused() -> None:
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    options = {action.dest for action in get_args_parser()._actions if isinstance(action, (env, check_env))}
    read = {"nnodes", "nproc_per_node", "node_rank", "rdzv_endpoint", "master_addr", "master_port"}
    assert options
    assert options <= read | set(machines._PET_REFUSED)


def test_an_option_that_the_operator_requests_too() -> None:
    assert planned("--cpu", "--max_restarts", "3", PET_MAX_RESTARTS="3", **OPERATOR).max_restarts == 3


def test_ranks_of_an_operator_are_no_world_of_one() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    with pytest.raises(LaunchConfigError, match=r"--num_machines \$WORLD_SIZE --machine_rank \$RANK .*\$MASTER_PORT"):
        planned(**env)
    flags = ("--num_machines", "4", "--machine_rank", "1", "--main_process_ip", "job-0")
    assert planned(*flags, **env).node_rank == 1
    assert planned(**env, LOCAL_RANK="0").nodes == 1


@pytest.mark.parametrize("variable", ["FLUX_JOB_SIZE=2", "JSM_NAMESPACE_SIZE=4", "PALS_LOCAL_SIZE=2", "PMIX_RANK=1"])
def test_several_tasks_are_not_as_many_worlds(variable: str) -> None:
    name, _, value = variable.partition("=")
    env = {name: value}
    with pytest.raises(LaunchConfigError, match=f"^{variable}: this launcher is one of several tasks.*WORLD_SIZE=1"):
        planned("--cpu", **env)
    assert planned("--cpu", WORLD_SIZE="1", **env).nodes == 1
    assert planned("--cpu", **{name: str(int(value) - 1 if name == "PMIX_RANK" else 1)}).nodes == 1
    assert planned("--cpu", *MACHINES.split(), **env).nodes == 2
    assert planned("--cpu", **env, **OPERATOR).nodes == 2


def test_rdzv_conf() -> None:
    assert planned("--rdzv_conf", "timeout=3, lost_after =4,a=b=c").rdzv_conf == {
        "timeout": "3",
        "lost_after": "4",
        "a": "b=c",
    }


def test_threads_are_shared_out() -> None:
    assert planned("--num_processes", "64").env["OMP_NUM_THREADS"] == "1"
    assert planned("--num_processes", "2", "--num_cpu_threads_per_process", "7").env["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in planned("--num_processes", "2", OMP_NUM_THREADS="5").env


def test_what_accelerator_reads() -> None:
    flags = (
        "--mixed_precision",
        "bf16",
        "--gradient_accumulation_steps",
        "4",
        "--debug",
        "--dynamo_backend",
        "inductor",
    )
    env = planned(*flags, "--dynamo_use_dynamic").env
    wanted = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "True",
    }
    assert wanted.items() <= env.items()


def test_dashes_and_underscores_are_one() -> None:
    assert planned("--num-processes", "2", "--shutdown-timeout", "1.5").grace_s == 1.5


@pytest.mark.parametrize(
    ("spec", "meaning"),
    [("0", {None: 0}), ("3", {None: 3}), ("0:3,1:1", {0: 3, 1: 1})],
)
def test_tee(spec: str, meaning: dict[int | None, int]) -> None:
    assert parse(spec) == meaning
