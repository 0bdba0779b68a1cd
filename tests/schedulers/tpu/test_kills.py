"""Whatever is killed, and whenever, no slice and no queued resource is left; and a job that can go on does.

A client is a process of its own, which SIGKILL ends before or after a call. Then another client goes on, or nobody.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, State
from tests.clusters.tpu import SERVICE_ACCOUNT, Tpu
from tests.waiting import until

from .conftest import CREATED, ROOT, deleted_by, empty, printed, runs, target_options

CLIENT = """
import importlib, json, os, signal, sys
import schedulers
from schedulers.tpu import api, target
given = json.loads(sys.argv[1])
for name, seconds in given["limits"].items():
    setattr(api, name, seconds)
target._RETRY_PAUSES_S = (0.5, 0.5)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def wrap(when, place, nth):
    module, _, names = place.partition(":")
    *owners, name = names.split(".")
    owner = importlib.import_module(module)
    for each in owners:
        owner = getattr(owner, each)
    original, calls = getattr(owner, name), []
    def wrapped(*args, **kwargs):
        calls.append(None)
        if len(calls) == nth and when == "before":
            die()
        result = original(*args, **kwargs)
        if len(calls) == nth:
            die()
        return result
    setattr(owner, name, wrapped)
if given["point"]:
    wrap(*given["point"])
job = schedulers.submit("sh", ["job.sh"], target="tpu", options=given["options"], **given["more"])
if given["then"] == "cancel":
    print("submitted", flush=True)
    sys.stdin.readline()
    job.cancel()
elif given["then"] == "wait":
    job.wait()
"""
# As short as a loaded machine allows. Of rows in which a client goes on, the slice must not act meanwhile.
SOON = {"ENDED_S": 2.0, "ARRIVE_S": 0.0, "SILENT_S": 6.0, "OTHERS_S": 1.0}
LATER = {"OTHERS_S": 1.0}
API = "schedulers.tpu.api:Api"
START = "schedulers.hosts.jobs.submit:start"


@dataclass(frozen=True, kw_only=True)
class Row:
    """point: where the first client kills itself; `then`: what it does after the submit. alone: nobody goes on.
    happens: what goes wrong while the job runs. ends: how the job ends for the client that goes on."""

    point: tuple[str, str, int] | None = None
    then: str = "wait"
    happens: Callable[[Tpu, Job], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    ends: tuple[State, Reason] = (State.SUCCEEDED, Reason.NONE)


def first_slice(job: Job) -> str:
    return f"accel-{job.id}-0"


def crash(tpu: Tpu, job: Job) -> None:
    tpu.crash(first_slice(job), 0)


def kill_supervisors(tpu: Tpu, job: Job) -> None:
    tpu.hosts[tpu.workers(first_slice(job))[0]].run("pkill", "-KILL", "-f", "supervisor.pyz")


def cut_off(tpu: Tpu, job: Job) -> None:
    tpu.hosts[tpu.workers(first_slice(job))[0]].link(False)


def stop(tpu: Tpu, job: Job) -> None:
    tpu.set_state(first_slice(job), "STOPPED")


def preempt(tpu: Tpu, job: Job) -> None:
    tpu.preempt(first_slice(job))


def end_without_api(tpu: Tpu, job: Job) -> None:
    """The job ends, and for a while nobody can delete anything."""
    hosts = [tpu.hosts.home(host) for host in tpu.workers(first_slice(job))]
    tpu.down()
    (Path(job.spec.env["GO"])).touch()
    until(lambda: all((home / f".accel/jobs/{job.id}/exit.json").exists() for home in hosts), "the job has ended", 60)
    tpu.up()


FAILED = (State.FAILED, Reason.NODE_FAILURE)
SPOT: dict[str, Any] = {"spot": True, "queued": True}
ROWS = {
    # SIGKILL of the client on the way to the slice …
    "before the slice is asked for": Row(point=("before", f"{API}.create", 1)),
    "asked for, and the answer not read": Row(point=("after", f"{API}.create", 1)),
    "asked for, and nobody goes on": Row(point=("after", f"{API}.create", 1), alone=True),
    "the submit not recorded": Row(
        point=("before", "schedulers.jobs.submit:_record_native_id", 1), options={"queued": True}
    ),
    # … to the start …
    "READY": Row(point=("before", "schedulers.tpu.slice_target:SliceTarget.wait_reachable", 1)),
    "shipped and not started": Row(point=("before", START, 1)),
    "shipped, and nobody goes on": Row(point=("before", START, 1), alone=True),
    "started, and not seen": Row(point=("after", START, 1)),
    "started, and nobody goes on": Row(point=("after", START, 1), alone=True),
    # … and to the deletion.
    "ended, and not deleted": Row(point=("before", f"{API}.delete", 1)),
    "ended, and nobody goes on": Row(point=("before", f"{API}.delete", 1), options=SPOT, alone=True),
    "deleted, and not recorded": Row(point=("after", f"{API}.delete", 1)),
    "a cancel, before the hosts know": Row(
        point=("before", "schedulers.hosts.jobs.submit:cancel", 1), then="cancel", ends=(State.CANCELLED, Reason.USER)
    ),
    "a cancel, and nobody goes on": Row(
        point=("after", "schedulers.hosts.jobs.submit:cancel", 1), then="cancel", alone=True
    ),
    "preempted, and not deleted": Row(point=("before", f"{API}.delete", 1), happens=preempt, options={"spot": True}),
    "preempted, and the next not asked for": Row(point=("before", f"{API}.create", 2), happens=preempt, options=SPOT),
    # Other things go wrong.
    "a host": Row(happens=crash, ends=FAILED),
    "a host, and nobody looks": Row(then="", happens=crash, alone=True),
    "supervisors": Row(happens=kill_supervisors, ends=FAILED),
    "supervisors, and nobody looks": Row(happens=kill_supervisors, alone=True),
    "the network": Row(happens=cut_off, ends=FAILED),
    "the slice is stopped": Row(happens=stop, ends=FAILED),
    "the API": Row(happens=end_without_api),
    "the API, and nobody looks": Row(happens=end_without_api, alone=True),
    "a grant when the client is gone": Row(then="", options={"queued": True}, alone=True),
}
IN_ANY_RUN = ("asked for, and the answer not read", "ended, and nobody goes on")


def rows() -> list[Any]:
    return [
        pytest.param(row, id=name, marks=[] if name in IN_ANY_RUN else pytest.mark.long) for name, row in ROWS.items()
    ]


@pytest.mark.parametrize("row", rows())
def test_nothing_is_left(
    row: Row, tpu: Tpu, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("schedulers.tpu.target._RETRY_PAUSES_S", (0.5, 0.5))
    go, waits = tmp_path / "go", bool(row.happens) or row.then == "cancel"
    (project / "job.sh").write_text('echo up; while [ ! -e "$GO" ]; do sleep 0.1; done\n')
    if not waits:
        go.touch()
    if row.then == "" and row.happens is None:
        tpu.capacity(False)
    given = {
        "point": row.point, "then": row.then, "limits": SOON if row.alone else LATER,
        "options": {**target_options(tpu), **CREATED, "start_timeout_s": 10 if row.alone else 20, **row.options},
        "more": {"entry": "command", "procs_per_node": 1, "grace_s": 2.0,
                 "env": {"GO": str(go), "PYTHONPATH": str(ROOT)}},
    }  # fmt: skip
    argv = [sys.executable, "-c", CLIENT, json.dumps(given)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=project, env=env, stdin=subprocess.PIPE, text=True) as client:
        _disturb(row, tpu, client, go)
        if row.point:
            assert client.wait(120) == -signal.SIGKILL
        client.kill()
    if row.then == "" and row.happens is None:
        tpu.grant(first_slice(schedulers.find("@last")))
    if row.alone:
        empty(tpu)
        assert deleted_by(tpu) == {SERVICE_ACCOUNT}
        return
    go.touch()
    job = schedulers.find("@last")
    status = job.wait(120)
    assert (status.state, status.reason) == row.ends, (status, tpu.diagnose())
    assert status.attempt == (1 if row.happens is preempt else 0)
    empty(tpu)
    if row.ends[0] is State.SUCCEEDED:
        assert printed(job) == [(0, "up\n"), (1, "up\n")]


def _disturb(row: Row, tpu: Tpu, client: subprocess.Popen[str], go: Path) -> None:
    """Waits until the job runs, and has happen what happens; a client that is to cancel is told."""
    if row.happens is None and row.then != "cancel":
        if row.point is None:
            assert client.wait(60) == 0
        return
    until(lambda: bool(schedulers.list_jobs(refresh=False)), "there is a job", 60)
    job = schedulers.find("@last")
    if row.then in ("", "cancel"):
        runs(job)
    else:
        until(lambda: (0, "up\n") in printed(schedulers.find(job.id)), "the job runs", 90)
    if row.then == "cancel":
        client.communicate("\n", timeout=120)
        return
    if row.point is None:
        client.kill()
        client.wait()
    assert row.happens is not None
    row.happens(tpu, job)
    if row.happens is preempt:
        go.touch()
