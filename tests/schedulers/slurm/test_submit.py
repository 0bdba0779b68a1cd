"""A job is submitted once: whoever kills the submit, wherever, and whatever the controller forgets."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import schedulers
from schedulers import Job, State
from schedulers.job import Reason
from schedulers.store.record import Record
from tests.clusters.slurm import Slurm
from tests.waiting import until

from .conftest import Submit, printed

# Submits a job and is killed, by itself, at its Nth step inside the job's directory on the shared file system.
CUT = """\
import os, signal, sys
import schedulers

steps = 0
def step(event, args):
    global steps
    # The word that the job is to be submitted is on the disk by then: that is where this begins.
    if event in ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "subprocess.Popen", "fcntl.flock"):
        told = event in ("subprocess.Popen", "fcntl.flock") or "/slurm" in str(args[0]) + str(args[1])
        if told and began:
            steps += 1
            if steps == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGKILL)

began = False
sys.addaudithook(step)
import schedulers.slurm.submit as submitting
submit = submitting.submit
def noted(request):
    global began
    began = True
    return submit(request)
submitting.submit = noted
schedulers.submit("true", entry="command", target="slurm", cpus=1, procs_per_node=1,
                  options={"cpu": True, "sbatch": {"begin": "now+1hour"}})
print("whole")
"""

# In the place of sbatch: kills whoever called it, before or after the real one has done its work.
KILLS = """\
#!/bin/sh
rm {this}
{before}
{real} "$@" > {answer}
{after}
cat {answer}
"""


def numbers(job: Job) -> list[str]:
    """The jobs of Slurm's that carry this one's comment."""
    words = ["squeue", "--me", "--states=all", "-h", "-O", "JobArrayID:30,Comment:100"]
    rows = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return [row.split()[0] for row in rows if row.split()[1] == f"accel:{job.id}"]


def the_job() -> Job:
    (found,) = schedulers.list_jobs(refresh=False)
    assert isinstance(found, Record)
    return Job(found)


def test_killed_at_every_step(slurm: Slurm, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = False
    count = 0
    while not whole:
        count += 1
        assert count < 200
        monkeypatch.setenv("ACCEL_HOME", str(home / str(count)))
        words = [sys.executable, "-c", CUT, str(count)]
        done = subprocess.run(words, cwd=project, capture_output=True, text=True)
        whole = done.stdout == "whole\n"
        assert whole or done.returncode == -9, done.stderr
        job = the_job()
        assert job.native_id is not None or not whole
        assert job.status().state is State.QUEUED, job.record.warning
        assert numbers(job) == [str(job.native_id).partition("/")[0]], f"cut off at step {count}"
    assert count > 20


@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_while_sbatch_runs(
    moment: str, slurm: Slurm, home: Path, project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job may be there, and nobody was told its number. It runs once, to its end."""
    kill = "kill -9 $PPID; sleep 0.3"  # sbatch may well get through after its caller's end
    this = tmp_path / "bin/sbatch"
    this.parent.mkdir()
    text = KILLS.format(
        this=shlex.quote(str(this)), answer=shlex.quote(str(tmp_path / "answer")), real=shutil.which("sbatch"),
        before=kill if moment == "before" else "", after=kill if moment == "after" else "",
    )  # fmt: skip
    this.write_text(text)
    this.chmod(0o755)
    monkeypatch.setenv("PATH", f"{this.parent}:{os.environ['PATH']}")
    code = (
        "import schedulers; schedulers.submit('sh', ['-c', 'echo once'], entry='command', target='slurm', cpus=1,"
        "procs_per_node=1, options={'cpu': True})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    job = the_job()
    assert job.native_id is None
    assert job.wait(90).state is State.SUCCEEDED
    assert len(numbers(job)) == 1
    assert printed(job) == "once\n"


def test_a_job_that_the_controller_lost(slurm: Slurm, submit: Submit) -> None:
    """It crashes before it has saved the job, and gives the number to the next one."""
    job = lost_by_the_controller(slurm, submit)
    number = str(job.native_id).partition("/")[0]
    assert job.status().state is State.QUEUED
    assert "does not know the job" in job.record.warning
    while (other := submit("sleep 60")).native_id is not None and not str(other.native_id).startswith(f"{number}/"):
        assert int(str(other.native_id).partition("/")[0]) < int(number)
    until(lambda: job.status().state is State.FAILED, "Slurm is asked anew")
    status = job.status()
    assert status.reason is Reason.LOST
    assert f"{number} is another job now" in status.message
    job.cancel()
    assert not other.status().state.final


def lost_by_the_controller(slurm: Slurm, submit: Submit) -> Job:
    """The controller saves what has changed at once when it has not done so for five seconds, and then waits as long:
    the second of two jobs is lost with it. Tried again where it has saved both together."""
    later = {"sbatch": {"begin": "now+1hour"}}
    for _ in range(10):
        saved, job = submit("echo never", options=later), submit("echo never", options=later)
        slurm.kill_controller()
        slurm.start_controller()
        saved.cancel()
        if not numbers(job):
            return job
        job.cancel()
    pytest.fail("the controller has saved every job before it was killed")


def test_a_controller_that_is_down(slurm: Slurm, submit: Submit) -> None:
    slurm.kill_controller()
    with pytest.raises(schedulers.Unreachable, match="kept as submitting"):
        submit("true")
    slurm.start_controller()
    job = the_job()
    status = job.status()
    if status.state is State.SUBMITTING:  # its process, this one, lives: that counts for a minute
        job.record.submitter = (job.record.submitter[0], 0)
        target = job.record.plan()
        native = submitted_again(job, target)
        assert numbers(job) == [native.partition("/")[0]]


def submitted_again(job: Job, plan: schedulers.Plan) -> str:
    from schedulers.jobs.poll import restore

    return restore(job.record).submit(plan)


def test_submitted_twice_it_is_one_job(slurm: Slurm, submit: Submit) -> None:
    job = submit("echo once")
    assert submitted_again(job, job.record.plan()) == job.native_id
    (job.record.directory / "slurm/submitted.json").unlink()
    assert submitted_again(job, job.record.plan()) == job.native_id
    assert job.wait(90).state is State.SUCCEEDED
    (job.record.directory / "slurm/submitted.json").unlink()
    assert submitted_again(job, job.record.plan()) == job.native_id
    assert len(numbers(job)) == 1


def test_a_comment_that_the_site_has_changed(slurm: Slurm, submit: Submit) -> None:
    job = submit("sleep 60")
    number = str(job.native_id).partition("/")[0]
    subprocess.run(["scontrol", "update", f"JobId={number}", "Comment=project x"], check=True)
    until(lambda: job.status().state is State.RUNNING, "it runs")
    assert job.cancel().state is State.CANCELLED


def test_no_space_left(slurm: Slurm, submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    small = slurm.small_disk / "home"
    monkeypatch.setenv("ACCEL_HOME", str(small))
    submit("true").wait(90)
    filler = slurm.small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            pass
    with pytest.raises((schedulers.SubmitError, schedulers.StoreError), match=r"disk full|No space left") as refusal:
        submit("true")
    assert "\n" not in str(refusal.value)


def test_the_sweep_of_a_killed_submit_goes_as_a_whole(slurm: Slurm, home: Path, project: Path) -> None:
    code = (
        "import os, signal, schedulers.slurm.submit as s\n"
        "from schedulers.job import JobSpec\n"
        "from schedulers.sweeps import submit_sweep\n"
        "s.submit = lambda request: os.kill(os.getpid(), signal.SIGKILL)\n"
        "specs = [JobSpec(argv=('echo', str(n)), entry='command', procs_per_node=1, code='.', options={'cpu': True})"
        " for n in range(3)]\n"
        "submit_sweep(specs, 'slurm')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    jobs = [Job(record) for record in reversed(schedulers.list_jobs(refresh=False)) if isinstance(record, Record)]
    for at in (1, 0, 2):
        assert jobs[at].wait(90).state is State.SUCCEEDED
    assert [printed(job) for job in jobs] == ["0\n", "1\n", "2\n"]
    assert len({str(job.native_id).partition("_")[0] for job in jobs}) == 1
    noted = json.loads((jobs[2].record.directory / "slurm/submitted.json").read_text())
    assert noted["first"] == jobs[0].id
