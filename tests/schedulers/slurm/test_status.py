"""What is said of jobs, and how seldom Slurm is asked for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import schedulers
from schedulers import Job, State
from schedulers.job import Reason
from schedulers.jobs.poll import restore
from schedulers.slurm import status as queries
from schedulers.slurm.login import job_ops as here
from schedulers.slurm.login import slurm_commands as commands
from schedulers.slurm.login import squeue_cache
from schedulers.store.record import Record
from tests.clusters.slurm import Slurm
from tests.marks import long
from tests.waiting import until

from .conftest import Calls, Submit, printed

LATER = {"sbatch": {"begin": "now+1hour"}}


def number(job: Job) -> str:
    return str(job.native_id).partition("/")[0]


@pytest.mark.long
def test_two_hundred_jobs_at_once(
    slurm_accounting: Slurm, home: Path, project: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking for all of them is one squeue, whatever was said of each, and even where their comments are changed; and
    one sacct for those that squeue has forgotten."""
    from concurrent.futures import ThreadPoolExecutor

    def one(at: int) -> Job:
        return schedulers.submit(
            "true",
            entry="command",
            target="slurm",
            cpus=1,
            cwd=project,
            name=f"job {at}",
            options={"cpu": True, "sbatch": {**LATER["sbatch"], "nice": at % 3}},
        )

    with ThreadPoolExecutor(16) as pool:
        jobs = list(pool.map(one, range(200)))
    assert len({number(job) for job in jobs}) == 200
    assert Counter(calls.taken()) == {"scontrol": 200, "sbatch": 200}
    for job in jobs[:3]:
        slurm_accounting.run(["scontrol", "update", f"JobId={number(job)}", "Comment=the site's"])
    calls.taken()
    records = schedulers.list_jobs()
    assert calls.taken() == ["squeue"]
    assert {record.status.state for record in records if isinstance(record, Record)} == {State.QUEUED}
    # One that Slurm's controller has forgotten, as it does after MinJobAge.
    monkeypatch.setattr(queries, "_SEARCH_S", 1000.0)
    forgotten = restore(jobs[0].record)
    for _ in range(20):
        forgotten.poll([f"987654/{jobs[0].id}", *(str(job.native_id) for job in jobs[1:])])
    assert calls.taken().count("sacct") == 1
    assert commands.accounts_of([f"{987654 + at // 5}_{at}" for at in range(50_000)], {}) == []
    assert calls.taken() == ["sacct", "sacct"]


def test_how_a_job_ended_that_left_no_result(slurm: Slurm, submit: Submit) -> None:
    job = submit("sleep 60")
    until(lambda: job.status().state is State.RUNNING and (job.record.directory / "slurm/attempt").exists(), "it runs")
    for machine in slurm.nodes:
        for process in machine.processes("python3") + machine.processes("python"):
            process.send(9)
    assert job.wait(90).state is State.FAILED
    assert not (job.record.directory / "exit.json").exists()


@pytest.mark.parametrize("accounting", [True, *long(False)])
def test_a_job_that_the_controller_has_forgotten(
    accounting: bool, request: pytest.FixtureRequest, submit: Submit, calls: Calls
) -> None:
    """As it does some time after the end. Accounting remembers; where it is off, the job is unknown."""
    slurm: Slurm = request.getfixturevalue("slurm_accounting" if accounting else "slurm")
    slurm.configure(MinJobAge="2")
    job = submit("exit 5")
    assert job.wait(90).exit_code == 5
    (job.record.directory / "exit.json").unlink()
    until(lambda: number(job) not in slurm.run("squeue -h -t all -o %A".split()).stdout.split(), "it is forgotten")
    if accounting:
        words = ["sacct", "-n", "-X", "-o", "State", "-j", number(job)]
        until(lambda: "FAILED" in slurm.run(words).stdout, "accounting knows of its end")
    target, native = restore(job.record), str(job.native_id)
    calls.taken()
    found = target.poll([native])
    assert "sacct" in calls.taken()
    if accounting:
        assert (found[native].state, found[native].exit_code) == (State.FAILED, 5)
    else:
        assert found == {}
        assert target.poll([native]) == {}
        assert "sacct" not in calls.taken()  # that accounting is off is not asked again


def test_a_batch_script_that_ends_before_anything_of_ours(slurm: Slurm, submit: Submit) -> None:
    status = submit("true", options={"python": "/nowhere/python"}).wait(90)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.SETUP, 127)
    assert status.message.startswith("its batch script exited before accel started; its output: ")
    assert "/nowhere/python" in status.message


def test_the_result_beats_what_slurm_says(slurm: Slurm, submit: Submit) -> None:
    job = submit("sleep 60")
    result = {"schema": 1, "state": "failed", "reason": "rendezvous", "exit_code": 1, "message": "n2 did not come"}
    (job.record.directory / "exit.json").write_text(json.dumps(result))
    status = job.status()
    assert (status.reason, status.message) == (Reason.RENDEZVOUS, "n2 did not come")


def test_a_damaged_result(slurm: Slurm, submit: Submit) -> None:
    job = submit("sleep 60")
    (job.record.directory / "exit.json").write_text("{")
    target = restore(job.record)
    status = target.poll([str(job.native_id)])[str(job.native_id)]
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)
    assert "cannot be read" in status.message


def test_a_controller_that_cannot_be_asked(slurm: Slurm, submit: Submit) -> None:
    """What was known stays; a result is found all the same."""
    waiting, over = submit("true", options=LATER), submit("echo done")
    assert over.wait(90).state is State.SUCCEEDED
    assert waiting.status().state is State.QUEUED
    seen = waiting.status().observed_at
    slurm.kill_controller()
    fresh = schedulers.find(waiting.id)
    until(lambda: fresh.status().state is State.QUEUED and fresh.record.warning.startswith("squeue"), "that is said")
    assert fresh.status().observed_at > seen - 1.0  # the age of an answer is told, and as many ms are lost on the way
    with pytest.raises(schedulers.Unreachable) as silence:
        restore(over.record).poll([str(over.native_id), str(waiting.native_id)])
    assert silence.value.answers[str(over.native_id)].state is State.SUCCEEDED
    assert list(silence.value.silent or ()) == [str(waiting.native_id)]
    slurm.start_controller()


def test_accounting_that_does_not_answer(slurm_accounting: Slurm, submit: Submit) -> None:
    job = submit("echo done", options=LATER)
    slurm_accounting.kill_accounting()
    target = restore(job.record)
    assert target.poll([str(job.native_id)])[str(job.native_id)].state is State.QUEUED
    with pytest.raises(schedulers.Unreachable, match="sacct"):
        target.poll([f"987654/{job.id}"])
    slurm_accounting.start_accounting()


def test_slurm_is_asked_seldom(
    slurm: Slurm, submit: Submit, calls: Calls, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many processes ask, and whatever for."""
    job = submit("true", options=LATER)
    calls.taken()
    target = restore(job.record)
    monkeypatch.setattr(squeue_cache, "PACE_S", 1000.0)
    for _ in range(20):
        target.poll([str(job.native_id)])
        assert not target.wait(str(job.native_id), 0.0)  # type: ignore[attr-defined]
        list(target.logs(f"987654/{job.id}"))  # of which nothing is known
        restore(job.record).poll([str(job.native_id)])
        squeue_cache._cache.clear()  # as another process
    assert calls.taken() == ["squeue", "sacct"]
    slurm.run(["scontrol", "update", f"JobId={number(job)}", "Comment=the site's"])
    (job.record.directory / "slurm/submitted.json").unlink()
    assert here.earlier(str(home), job.id, array=False) == number(job)
    job.cancel()
    assert job.status().state is State.CANCELLED


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 9}, "it requests more nodes than its partition allows (PartitionNodeLimit)"),
        ({"options": {"partition": "small"}, "time_limit_s": 3600}, "it requests more time than its partition allows"),
        ({"options": {"sbatch": {"hold": True}}}, "it is held; scontrol release frees it"),
        ({"options": LATER}, "its begin time has not come yet"),
    ],
)
def test_why_it_waits(given: dict[str, object], message: str, slurm: Slurm, submit: Submit) -> None:
    job = submit("true", **given)
    until(lambda: job.status(refresh=True).message.startswith(message), f"{message}, not {job.status().message}")
    assert job.status().state is State.QUEUED


def test_another_ones_number(slurm: Slurm, submit: Submit) -> None:
    """A number that is somebody else's job by now: nothing is said of ours, and nothing done to theirs."""
    job = submit("echo mine")
    assert job.wait(90).state is State.SUCCEEDED
    other = submit("sleep 60")
    until(lambda: other.status().state is State.RUNNING, "it runs")
    (job.record.directory / "exit.json").unlink()
    target = restore(job.record)
    mistaken = f"{number(other)}/{job.id}"
    assert target.poll([mistaken]) == {}
    target.cancel(mistaken)
    assert other.status().state is State.RUNNING
    assert printed(job) == "mine\n"
