"""What a scheduler that starts `accel launch` on each node may say to it by variables, and by its signals."""

from __future__ import annotations

import json
import signal
import time

import pytest

from accel.exit_codes import REQUEUE

from .conftest import Launcher
from .test_nodes import free_port

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
    launcher.nothing_left(1)


@pytest.mark.parametrize("requeued", [True, False])
def test_who_starts_warned_ranks_again(launcher: Launcher, requeued: bool) -> None:
    """The scheduler, where it has said so: elsewhere, when the place is to be had. Else the launcher."""
    script = launcher.script("import os, sys; sys.exit(85 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)")
    flags = (*GANG, "--max_restarts", "3", "--log_dir", "logs", script)
    if requeued:
        launcher(*flags, code=REQUEUE, ACCEL_REQUEUED="1")
    else:
        launcher(*flags)
    assert (launcher.here / "logs/rank-0.a1.log").exists() is not requeued


def test_events_go_where_they_are_wanted(launcher: Launcher) -> None:
    events = launcher.here / "own.jsonl"
    launcher(*SINGLE, launcher.script("raise SystemExit(3)"), code=3, ACCEL_LAUNCH_EVENTS=str(events))
    assert [json.loads(line)["event"] for line in events.read_text().splitlines()] == ["attempt", "failure"]
    assert (launcher.here / "logs/launch.jsonl").read_text() == ""


def test_nodes_that_do_not_come_are_named(launcher: Launcher) -> None:
    port = str(free_port())
    done = launcher(
        "--cpu", "--num_processes", "3", "--rdzv_conf", "timeout=1", launcher.script("pass"), code=1,
        ACCEL_NODE_NAMES="n1,n2,n3", ACCEL_NODE_RANK="0", ACCEL_NODES="3", ACCEL_MASTER="127.0.0.1", ACCEL_PORT=port,
    )  # fmt: skip
    assert f"of 3 nodes, node 1 (n2), 2 (n3) did not come to 127.0.0.1:{port} within 1 s" in done.err
