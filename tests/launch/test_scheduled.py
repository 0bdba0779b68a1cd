"""What a scheduler that starts `accel launch` on each node may say to it by variables, and by its signals."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from accel.exit_codes import REQUEUE
from tests.marks import long
from tests.ports import free_port

from .conftest import Launcher

GANG = ("--cpu", "--num_processes", "2")
SINGLE = ("--cpu", "--num_processes", "1", "--log_dir", "logs")

SAVES_SLOWLY = """\
import os, signal, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(print("saving", os.environ["RANK"], flush=True)))
print("ready", os.environ["RANK"], flush=True)
while not asked or not os.path.exists("go"): time.sleep(0.01)
os._exit(85)
"""


@pytest.mark.parametrize("flags", [(*GANG, "--log_dir", "logs"), SINGLE], ids=["two ranks", "one rank"])
def test_slurm_tells_to_end_several_times_over(launcher: Launcher, flags: tuple[str, ...]) -> None:
    """At the beginning of a grace and at its end, two times at once: ranks that save have their grace all the same."""
    run = launcher.start(
        "--shutdown_timeout", "1000", "--tee", "3", *flags, launcher.script(SAVES_SLOWLY), SLURM_STEP_ID="0"
    )
    count = int(flags[flags.index("--num_processes") + 1])
    run.says(*(f"ready {rank}" for rank in range(count)))
    run.send(signal.SIGTERM)
    run.says(*(f"saving {rank}" for rank in range(count)))
    for _ in range(3):
        run.send(signal.SIGTERM)
        time.sleep(0.05)
    assert run.process.poll() is None
    (launcher.here / "go").touch()
    assert run.wait().code == REQUEUE
    launcher.nothing_left()


WARNED = """\
import atexit, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Kept:
    def __init__(self):
        self.itself, self.file = self, open("kept" + os.environ["RANK"], "a")
    def __del__(self):
        print("found in a cycle", flush=True)
kept = Kept()
kept.file.write("written ")
atexit.register(kept.file.write, "at the end")
while not all(os.path.exists("kept" + rank) for rank in "01"):  # who ends first has the other one ended
    time.sleep(0.01)
sys.exit(85 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0)
"""


@pytest.mark.parametrize("requeued", [True, False])
def test_who_starts_warned_ranks_again(launcher: Launcher, requeued: bool) -> None:
    """The scheduler, where it has said so: elsewhere, when the place is to be had. Else the launcher."""
    flags = (*GANG, "--max_restarts", "3", "--log_dir", "logs", launcher.script(WARNED))
    if requeued:
        launcher(*flags, code=REQUEUE, ACCEL_REQUEUED="1")
    else:
        launcher(*flags)
    assert (launcher.here / "logs/rank-0.a1.log").exists() is not requeued
    for rank in range(2):  # ends without delay, and without loss
        assert (launcher.here / f"logs/rank-{rank}.a0.log").read_text() == ""
        assert (launcher.here / f"kept{rank}").read_text().startswith("written at the end")


def test_events_go_where_they_are_wanted(launcher: Launcher) -> None:
    events = launcher.here / "own.jsonl"
    launcher(*SINGLE, launcher.script("raise SystemExit(3)"), code=3, ACCEL_LAUNCH_EVENTS=str(events))
    assert [json.loads(line)["event"] for line in events.read_text().splitlines()] == ["attempt", "failure"]
    assert (launcher.here / "logs/launch.jsonl").read_text() == ""


def _launch(env: dict[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items()), sys.executable, "-m", "accel", "launch"]


def _slurm(rank: int, port: str, folder: Path) -> dict[str, str]:
    """A step of the nodes `localhost` and `n2`: the port is the step's own."""
    return {
        "SLURM_JOB_ID": port, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "localhost,n2", "SLURMD_NODENAME": ("localhost", "n2")[rank], "SLURM_NODEID": str(rank),
    }  # fmt: skip


def _pytorchjob(rank: int, port: str, folder: Path) -> dict[str, str]:
    return {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}


def _trainjob(rank: int, port: str, folder: Path) -> dict[str, str]:
    return _pytorchjob(rank, port, folder) | {"JOB_COMPLETION_INDEX": str(rank), "JOBSET_RESTART_ATTEMPT": "0"}


def _jobset(rank: int, port: str, folder: Path) -> dict[str, str]:
    return {
        "JOB_COMPLETION_INDEX": str(rank), "ACCEL_NODES": "2", "ACCEL_MASTER": "localhost", "ACCEL_PORT": port,
        "JOBSET_RESTART_ATTEMPT": "0",
    }  # fmt: skip


def _sagemaker(rank: int, port: str, folder: Path) -> dict[str, str]:
    """Hosts in no order, whose numbers sort otherwise than their letters do."""
    own = ("127.0.0.2", "127.0.0.10")[rank]
    file = folder / str(rank) / "input/config/resourceconfig.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"current_host": own, "hosts": ["127.0.0.10", "127.0.0.2"]}))
    return {"TRAINING_JOB_NAME": "run", "ACCEL_SM_ROOT": str(folder / str(rank))}


def _toolkit(rank: int, port: str, folder: Path) -> dict[str, str]:
    hosts = ["127.0.0.2", "127.0.0.10"]
    return {"SM_HOSTS": json.dumps(hosts[::-1]), "SM_CURRENT_HOST": hosts[rank]}


def _tpu(rank: int, port: str, folder: Path) -> dict[str, str]:
    return {"TPU_WORKER_ID": str(rank), "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.2", "TPU_ACCELERATOR_TYPE": "v4-16"}


def _supervised(rank: int, port: str, folder: Path) -> dict[str, str]:
    return {"ACCEL_NODE_RANK": str(rank), "ACCEL_NODES": "2", "ACCEL_MASTER": "localhost", "ACCEL_PORT": port}


@pytest.mark.parametrize(
    ("scheduler", "master", "source"),
    [
        (_slurm, "localhost", "step 0 of Slurm job"),
        (_pytorchjob, "localhost", "the training operator"),
        *long((_trainjob, "localhost", "the training operator")),
        *long((_jobset, "localhost", "the manifest of the job")),
        *long((_sagemaker, "127.0.0.2", "SageMaker")),
        *long((_toolkit, "127.0.0.2", "SageMaker")),
        *long((_tpu, "127.0.0.1", "TPU_WORKER_HOSTNAMES of the v4-16")),
        *long((_supervised, "localhost", "the job's environment (ACCEL_NODES)")),
    ],
)
def test_two_machines_that_only_the_scheduler_has_told(
    launcher: Launcher, scheduler: Callable[[int, str, Path], dict[str, str]], master: str, source: str
) -> None:
    """Number, rank and main address are the scheduler's, and one line of node 0's says so."""
    port = str(free_port())
    flags = ["--cpu", "--num_processes", "2", "--no_python", "sh", "-c", 'echo "$RANK of $WORLD_SIZE at $MASTER_ADDR"']
    if scheduler in (_sagemaker, _toolkit, _tpu):
        flags = ["--main_process_port", port, *flags]  # which these leave open: the default may be somebody's here
    environments = [scheduler(rank, port, launcher.tmp) for rank in range(2)]
    runs = [launcher.start(*flags, command=_launch(env)) for env in environments]
    first, second = (run.wait() for run in runs)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert (first.out, second.out) == (f"0 of 2 at {master}\n", f"1 of 2 at {master}\n")
    assert first.err.startswith(f"accel launch: 2 nodes, node 0 at {master}:")
    assert f", from {source}" in first.err
    assert (first.err.count("\n"), second.err) == (1, "")


def test_a_flag_against_the_scheduler_ends_with_the_code_of_a_wrong_line(launcher: Launcher) -> None:
    command = _launch(_tpu(1, "", launcher.tmp))
    done = launcher("--machine_rank", "0", launcher.script("pass"), code=2, command=command)
    assert done.err.startswith("accel launch: --machine_rank 0 contradicts TPU_WORKER_HOSTNAMES of the v4-16, where ")
    assert done.err.count("\n") == 1
    explained = launcher("--explain", "--machine_rank", "0", code=2, command=command)
    assert explained.err == done.err
    told = launcher("--explain", command=command).out.splitlines()
    assert told[:3] == [
        "num_machines\t2\tTPU_WORKER_HOSTNAMES of the v4-16",
        "machine_rank\t1\tTPU_WORKER_HOSTNAMES of the v4-16",
        "main_process_ip\t127.0.0.1\tTPU_WORKER_HOSTNAMES of the v4-16",
    ]


def test_nodes_that_do_not_come_are_named(launcher: Launcher) -> None:
    port = str(free_port())
    done = launcher(
        "--cpu", "--num_processes", "3", "--rdzv_conf", "timeout=1", launcher.script("pass"), code=1,
        ACCEL_NODE_NAMES="n1,n2,n3", ACCEL_NODE_RANK="0", ACCEL_NODES="3", ACCEL_MASTER="127.0.0.1", ACCEL_PORT=port,
    )  # fmt: skip
    assert f"node 1 (n2), 2 (n3) of 3 nodes did not join at 127.0.0.1:{port} within 1 s" in done.err
