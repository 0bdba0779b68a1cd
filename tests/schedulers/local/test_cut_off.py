"""A submit that is killed at any moment leaves a whole job or none, and the record of the job is complete."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import schedulers
from schedulers import State, find, list_jobs
from schedulers.local.job_files import JobFiles
from schedulers.processes import python_module
from tests.waiting import until

from .conftest import printed

MOMENTS = 8
SCRIPT = """
import os
with open("ran", "a") as ran:
    print(os.environ["ACCEL_JOB_ID"], file=ran)
print("trained")
"""
SUBMIT = """
import schedulers
schedulers.submit("train.py", options={"concurrency": 8})
"""
# The submit ends by SIGKILL when its supervisor stands, before it can record anything.
CUT = """
import os, signal
from schedulers.local import target
start = target._start_supervisor
def start_and_die(files):
    start(files)
    os.kill(os.getpid(), signal.SIGKILL)
target._start_supervisor = start_and_die
"""


@pytest.fixture
def runs(home: Path, project: Path) -> Path:
    """The file in which each run of a job leaves its id."""
    (project / "train.py").write_text(SCRIPT)
    return project / "ran"


def client(project: Path, code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], cwd=project, stderr=subprocess.DEVNULL)


def test_a_submit_that_is_killed_once_its_supervisor_stands(runs: Path) -> None:
    with client(runs.parent, CUT + SUBMIT) as process:
        assert process.wait() == -9
    job = find("@last")
    assert job.native_id == job.id
    assert job.record.status.state is not State.SUBMITTING
    until(lambda: JobFiles(job.record.directory).exit(), "its end")
    assert job.wait().state is State.SUCCEEDED
    assert (find(job.id).native_id, printed(job)) == (job.id, "trained\n")


def test_a_submit_that_is_killed_at_any_moment(runs: Path) -> None:
    began = time.monotonic()
    with client(runs.parent, SUBMIT) as process:
        assert process.wait() == 0
    whole_s = time.monotonic() - began

    def cut(number: int) -> None:
        with client(runs.parent, SUBMIT) as process:
            try:
                process.wait(whole_s * (0.3 + number / MOMENTS))
            except subprocess.TimeoutExpired:
                process.kill()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(cut, range(MOMENTS)))
    ids = [record.id for record in list_jobs(refresh=False)]
    assert ids
    for job_id in ids:
        job = find(job_id)
        assert (job.wait(60).state, job.native_id, printed(job)) == (State.SUCCEEDED, job_id, "trained\n")
    assert sorted(runs.read_text().split()) == sorted(ids)


def test_a_supervisor_that_comes_late_does_not_run_the_job_again(runs: Path) -> None:
    job = schedulers.submit("train.py", cwd=runs.parent)
    assert job.wait().state is State.SUCCEEDED
    late = python_module("schedulers.local.supervisor", str(job.record.directory))
    for name in ("nothing", "exit.json"):  # without a result, as after a supervisor that was killed
        (job.record.directory / name).unlink(missing_ok=True)
        assert subprocess.run(late).returncode == 0
        with open(job.record.directory / "local/supervisor.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it has ended
    assert runs.read_text().split() == [job.id]
