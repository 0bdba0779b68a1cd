"""`NodeMain`: what is pickled, what it loads, and what a node does that has no cluster around it."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schedulers.slurm.node import NodeMain
from tests.launch.conftest import until

ROOT = Path(__file__).parents[3]
Run = Callable[..., dict[str, Any]]


def test_it_is_pickled_by_its_name() -> None:
    data = pickle.dumps(NodeMain("/x"))
    assert len(data) < 200
    assert pickle.loads(data) == NodeMain("/x")


def test_it_loads_nothing_heavy() -> None:
    heavy = ["torch", "submitit", "msgspec", "yaml", "rich", "paramiko", "accel"]
    code = f"import sys, schedulers.slurm.node; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs node 0 of a job of one, as submitit would in its step; returns its report."""
    for name in ("logs", "code", "slurm/nodes/a0"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "slurm/attempt").write_text("0\n")

    def run(script: str, meanwhile: Callable[..., None] = lambda _: None, **changed: Any) -> dict[str, Any]:
        settings = {
            "schema": 1, "job_id": "j1", "nodes": 1, "procs_per_node": 1, "argv": ["sh", "-c", script],
            "entry": "command", "env": {}, "setup": [], "workdir": "code", "python": sys.executable,
            "launch": ["--cpu"], "grace_s": 1.0, "max_restarts": 0, "start_timeout_s": 5.0, **changed,
        }  # fmt: skip
        (tmp_path / "slurm/settings.json").write_text(json.dumps(settings))
        code = f"from schedulers.slurm.node import NodeMain; NodeMain({str(tmp_path)!r})()"
        own = {"MASTER": "127.0.0.1", "PORT": "20001", "ATTEMPT": "0", "NODE_NAMES": "n1", "JOB_ID": "j1"}
        env = {**os.environ, **{f"ACCEL_{name}": value for name, value in own.items()}}
        env |= {
            "SLURM_NODEID": "0",
            "SLURM_STEP_ID": "0",
            "PYTHONPATH": str(ROOT),
            "SUBMITIT_FOLDER": "/x",
            "ACCEL_LEFT": "over",
        }
        with open(tmp_path / "logs/node-0.log", "ab") as log:
            node = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=log, stderr=log)
        meanwhile(node)
        assert node.wait(60) == 0
        return dict(json.loads((tmp_path / "slurm/nodes/a0/0.json").read_text()))

    return run


@pytest.mark.parametrize("content", [None, "{", '{"OTHER": "x"}'])
def test_a_secret_without_a_value_starts_nothing(run: Run, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "slurm/secrets.json"
    if content is not None:
        path.write_text(content)
    report = run("touch started", secrets=["TOKEN"])
    assert not (tmp_path / "code/started").exists()
    assert (report["code"], report["refused"]) == (1, "setup")
    assert report["words"] == f"secrets TOKEN: no values in {path}. Submit the job again."


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_are_passed_on(run: Run, tmp_path: Path, signum: signal.Signals, processes: int) -> None:
    """Under proctrack/cgroup Slurm signals this process alone."""
    program = (
        "import os, signal, time\n"
        f"signal.signal({int(signum)}, lambda *_: os._exit(85))\n"
        "open('ready' + os.environ['RANK'], 'w').close()\n"
        "while True: time.sleep(0.02)"
    )

    def meanwhile(node: subprocess.Popen[bytes]) -> None:
        until(
            "all ranks are ready", lambda: all((tmp_path / f"code/ready{rank}").exists() for rank in range(processes))
        )
        node.send_signal(signum)

    report = run("", argv=[sys.executable, "-S", "-c", program], procs_per_node=processes, meanwhile=meanwhile)
    assert (report["code"], report["preempted"]) == (85, True)
    assert report["told"] == ("SIGTERM" if signum == signal.SIGTERM else None)


def test_a_report(run: Run, tmp_path: Path) -> None:
    report = run("echo done; exit 3")
    assert (report["node"], report["code"], report["refused"], report["told"]) == (0, 3, None, None)
    assert report["failure"]["rank"] == 0
    assert (tmp_path / "logs/rank-0.a0.log").read_text() == "done\n"
    assert (tmp_path / "slurm/nodes/a0/0.begun").exists()


def test_what_ranks_are_told(run: Run, tmp_path: Path) -> None:
    mine = {"MINE": "yes", "ACCEL_JOB_ID": "not mine to say", "NCCL_SOCKET_IFNAME": "mine"}
    run("env", env=mine, interface="ib0")
    env = dict(line.partition("=")[::2] for line in (tmp_path / "logs/rank-0.a0.log").read_text().splitlines())
    assert (env["MINE"], env["ACCEL_JOB_ID"], env["ACCEL_JOB_DIR"]) == ("yes", "j1", str(tmp_path))
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("ib0", "mine")
    assert env["ACCEL_FENCE"] == str(tmp_path / "slurm/attempt")
    assert not {"SUBMITIT_FOLDER", "ACCEL_LEFT"} & env.keys()


def test_a_node_of_an_earlier_start_begins_nothing(run: Run, tmp_path: Path) -> None:
    (tmp_path / "slurm/attempt").write_text("1\n")
    assert run("echo never")["told"] == "fence"
    assert not (tmp_path / "logs/rank-0.a0.log").exists()


def test_nothing_stays_behind(run: Run, tmp_path: Path) -> None:
    run("setsid sh -c 'echo $$ >pid; while :; do sleep 0.1; done' & while [ ! -s pid ]; do sleep 0.05; done; exit 0")
    pid = (tmp_path / "code/pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.parametrize(
    ("changed", "code", "reason", "said"),
    [
        ({"setup": [["sh", "-c", "exit 5"]]}, 5, "setup", "the setup command 'sh' failed with exit code 5"),
        ({"setup": [["/no/such"]]}, 127, "setup", "the setup command '/no/such' cannot be run: No such file or"),
        ({"workdir": "nowhere"}, 1, "setup", "directory not found: "),
        ({"argv": ["no-such-command"]}, 127, "setup", "command 'no-such-command' not found on PATH"),
        ({"python": "/no/python"}, 1, "setup", "/no/python: No such file or directory"),
    ],
)
def test_what_cannot_be_run_is_said(run: Run, changed: dict[str, Any], code: int, reason: str, said: str) -> None:
    report = run("true", **changed)
    assert (report["code"], report["refused"]) == (code, reason), report
    assert report["words"].startswith(said)
