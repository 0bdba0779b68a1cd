"""One home at two clusters: at the other login node, a job of this one neither ends nor is submitted again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from schedulers import Job, Reason, State, Status
from schedulers.jobs.handle import list_jobs
from schedulers.jobs.prune import prune
from schedulers.store.store import Record, Store
from tests.clusters.slurm import Slurm

from .conftest import Submit, until


def other_cluster(directory: Path) -> str:
    """Return a PATH with the commands of a cluster that has no job of ours; sbatch would leave a file."""
    answers = {
        "scontrol": "echo 'ClusterName             = elsewhere'", "squeue": "exit 0",
        "sacct": "echo 'Slurm accounting storage is disabled' >&2; exit 1", "sbatch": f"touch {directory}/submitted",
    }  # fmt: skip
    directory.mkdir()
    for name, text in answers.items():
        (directory / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def listed() -> Record:
    (record,) = list_jobs()
    assert isinstance(record, Record)
    return record


def test_at_another_cluster_nothing_becomes_of_a_job(
    slurm: Slurm, submit: Submit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job = submit(f"read line <'{gate}'")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    assert job.record.backend == "cluster=accel"
    with monkeypatch.context() as there:
        there.setenv("PATH", other_cluster(tmp_path / "bin"))
        for _ in range(2):
            assert listed().status.state is State.RUNNING
            assert "target slurm is now cluster=elsewhere, and job" in listed().warning
            assert prune(Store.default(), keep=0).ids == ()
        # A submit that was cut off: sbatch has not answered.
        cut_off(job)
        assert Job(job.record).status().state is State.SUBMITTING
        assert not (tmp_path / "bin/submitted").exists()
    until(lambda: job.status().state is State.RUNNING, "its own cluster knows it")
    gate.write_text("go\n")
    assert job.wait(120).state is State.SUCCEEDED


def cut_off(job: Job) -> None:
    """Take the number from the record, as it was before sbatch answered."""
    path = job.record.directory / "events.jsonl"
    first = path.read_text().splitlines()[0]
    dead = '"pid":4194303'
    path.write_text(first.replace(f'"pid":{os.getpid()}', dead) + "\n")
    assert dead in path.read_text()
    job.record.reload()


SUBMIT = """
import schedulers
try:
    schedulers.submit("true", entry="command", target="slurm", procs_per_node=1, cpus=1, options={"cpu": True})
except schedulers.Unreachable as error:
    print(error)
"""


def test_a_note_that_cannot_be_written_once_slurm_has_the_job(slurm: Slurm, home: Path, tmp_path: Path) -> None:
    """sbatch answers, and the job's number cannot be noted, as on a full disk: the job runs and is found."""
    wrapper = tmp_path / "bin/sbatch"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@"\nprlimit --pid $PPID --fsize=0\n')
    wrapper.chmod(0o755)
    ended = subprocess.run(
        [sys.executable, "-c", SUBMIT], env={**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.stdout.startswith("disk full: cannot write"), ended.stderr
    (record,) = list_jobs(refresh=False)
    assert isinstance(record, Record)
    assert (record.status.state, record.native_id) == (State.SUBMITTING, None)
    job = Job(record)
    until(lambda: job.status().state is State.SUCCEEDED, "it is found, and over")
    queue = subprocess.run(["squeue", "-h", "-t", "all", "-o", "%i %k"], check=True, capture_output=True, text=True)
    own = [line.split()[0] for line in queue.stdout.splitlines() if line.endswith(f" accel:{job.id}")]
    assert own == [str(job.native_id).partition("/")[0]]


def test_prune_keeps_what_slurm_runs(slurm: Slurm, submit: Submit, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    job, over = submit(f"read line <'{gate}'"), submit("true")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    assert over.wait(120).state is State.SUCCEEDED
    job.record.update(Status(state=State.FAILED, reason=Reason.LOST))  # by inference, as an earlier version did
    # Slurm has a job for a moment after it has stated its result.
    until(lambda: prune(Store.default(), keep=0).ids == (over.id,), "the one that is over is pruned")
    reasons = prune(Store.default(), keep=0).kept_reasons
    assert reasons == (f"job {job.id} is kept: it still runs: running in Slurm",)
    gate.write_text("go\n")
    until(lambda: prune(Store.default(), keep=0).ids == (job.id,), "it is over")
