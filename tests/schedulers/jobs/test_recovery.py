"""Jobs whose submit was cut off or is cancelled: found on their target, never submitted by a listing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from accel.cli import exit_status, main
from schedulers.config.named_targets import resolve_target
from schedulers.errors import SpecError, Unreachable
from schedulers.job import JobSpec, Reason, State
from schedulers.jobs.handle import Job, find, list_jobs, submit
from schedulers.processes import boot_id
from schedulers.slurm.target import SlurmTarget
from schedulers.store.record import Record
from tests.waiting import until

from .test_handle import ROOT, Place, before_long_ago, place, release, released, texts

__all__ = ["place"]


def listed() -> Record:
    (record,) = list_jobs()
    assert isinstance(record, Record)
    return record


def cut_off(place: Place, crash: str, script: str = "true", target: str = "finding", **more: bool) -> Job:
    options = f"target={target!r}, entry='command', options={ {'crash': crash, **more} }"
    done = place.python(f"schedulers.submit('sh', ['-c', {script!r}], {options})")
    assert done.returncode == -signal.SIGKILL
    return find("@last")


def submits(place: Place) -> int:
    return sum(call.startswith("submit") for call in place.calls())


def test_a_list_finds_the_job_of_a_submit_that_was_cut_off(place: Place) -> None:
    gate = place.here / "gate"
    job = cut_off(place, "after", released(gate))
    record = listed()
    assert (record.status.state, record.native_id, record.warning) == (State.RUNNING, f"n-{job.id}", "")
    assert submits(place) == 1
    release(gate)
    assert job.wait(120).state is State.SUCCEEDED
    assert submits(place) == 1


def test_a_list_keeps_the_native_id_of_a_job_that_may_lack_something(place: Place) -> None:
    gate = place.here / "gate"
    job = cut_off(place, "after", f"echo 0 on; {released(gate)}", whole=False)
    for _ in range(2):
        record = listed()
        assert (record.status.state, record.native_id, record.incomplete) == (State.RUNNING, f"n-{job.id}", True)
    until(lambda: texts(list(job.logs())) == "0 on\n", "its output")
    assert submits(place) == 1
    assert job.status().state is State.RUNNING
    assert (submits(place), job.record.incomplete) == (2, False)
    release(gate)
    assert job.wait(120).state is State.SUCCEEDED


@pytest.mark.parametrize("whole", [True, False])
def test_logs_finds_the_job_of_a_submit_that_was_cut_off(place: Place, whole: bool) -> None:
    job = cut_off(place, "after", "echo 0 on", whole=whole)
    until(lambda: texts(list(job.logs())) == "0 on\n", "its output")
    assert submits(place) == 1
    assert (job.native_id, job.record.incomplete) == (f"n-{job.id}", not whole)


def test_a_cancel_that_is_not_answered_is_repeated(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    job = cut_off(place, "after", "sleep 1000")
    job.record.append("cancel", host="another-host", pid=1)
    target = job._target()
    with monkeypatch.context() as silent:
        silent.setattr(target, "cancel", raises(Unreachable("no answer")))
        assert job.status().state is State.RUNNING
    assert (job.native_id, job.record.incomplete, job.record.warning) == (f"n-{job.id}", True, "no answer")
    listed()
    assert find(job.id).wait(120).state is State.CANCELLED
    assert submits(place) == 1


def raises(error: Exception) -> Any:
    def function(*_: object) -> None:
        raise error

    return function


def test_a_list_submits_nothing(place: Place) -> None:
    job = cut_off(place, "before")
    record = listed()
    assert (record.status.state, record.native_id) == (State.SUBMITTING, None)
    assert record.warning == f"its submit was cut off; `accel status {job.id}` resumes it"
    assert submits(place) == 1
    assert job.wait(120).state is State.SUCCEEDED  # which carries it out


def test_a_target_that_cannot_be_asked_for_it_is_a_warning(place: Place) -> None:
    cut_off(place, "after")
    (place.home / "unreachable").touch()
    assert (listed().status.state, listed().warning) == (State.SUBMITTING, "the shell does not answer")
    (place.home / "unreachable").unlink()
    assert find("@last").wait(120).state is State.SUCCEEDED


def test_a_cancel_of_a_submit_that_was_cut_off_ends_the_job_that_it_made(place: Place) -> None:
    job = cut_off(place, "after", "sleep 1000")
    assert job.cancel().state is State.CANCELLED
    assert submits(place) == 1


def test_a_cancel_of_a_submit_that_made_no_job_is_never_carried_out(place: Place) -> None:
    job = cut_off(place, "before", target="identified")
    assert job.cancel(wait=False).state is State.SUBMITTING
    assert job.record.warning == "target identified does not know the job"
    assert listed().status.state is State.SUBMITTING  # a backend may answer late
    before_long_ago(job)
    record = listed()
    assert (record.status.state, record.status.reason) == (State.CANCELLED, Reason.USER)
    assert submits(place) == 1


def test_a_cancel_on_another_machine_takes_effect_once_the_job_is_found(place: Place) -> None:
    """The record says that another host (and boot) submits it, which has not had its answer yet."""
    job = cut_off(place, "after", "sleep 1000")
    events = job.record.directory / "events.jsonl"
    events.write_text(events.read_text().replace(os.uname().nodename, "another-host").replace(boot_id(), "1"))
    assert job.cancel(wait=False).state is State.SUBMITTING
    assert "accel cancels it once target finding confirms it" in job.record.warning
    assert not any(call.startswith(("find", "cancel")) for call in place.calls())
    before_long_ago(job)
    rows = events.read_text().replace('"created_at": ', '"created_at": 1e9, "was": ')
    events.write_text(rows)  # its submit has taken too long to go on
    assert listed().native_id == f"n-{job.id}"
    assert find(job.id).wait(120).state is State.CANCELLED
    assert submits(place) == 1


@contextmanager
def submitting(place: Place, hang: str) -> Iterator[tuple[subprocess.Popen[str], Job]]:
    """`accel submit`, waiting for its target before or after the job was started."""
    os.mkfifo(place.home / "hang")
    words = ["submit", "--target", "finding", "--option", f"hang={hang}", "--no-python", "--", "sleep", "1000"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(place.site)])}
    with subprocess.Popen(
        [sys.executable, "-m", "accel", *words], cwd=place.here, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            until((place.home / "hangs").exists, "the submit at its target")
            yield process, find("@last")
        finally:
            process.kill()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_submit_cancels_its_job_when_it_was_cancelled_meanwhile(place: Place, moment: str) -> None:
    with submitting(place, moment) as (process, job):
        assert job.cancel(wait=False).state is State.SUBMITTING
        warning = f"process {process.pid} on {os.uname().nodename} is submitting job {job.id}: accel cancels it"
        assert job.record.warning == f"{warning} once target finding confirms it"
        os.close(os.open(place.home / "hang", os.O_WRONLY))
        assert process.communicate(timeout=60)[0] == f"{job.id}\n"
        assert process.returncode == 0
    assert job.wait(60).state is State.CANCELLED
    assert submits(place) == 1


def test_a_signal_that_no_cancel_sent_ends_a_submit_as_ever(place: Place) -> None:
    with submitting(place, "after") as (process, job):
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    assert listed().status.state is State.RUNNING
    assert job.cancel().state is State.CANCELLED


def test_a_submit_that_ends_after_the_cancel_cancels_its_job(place: Place) -> None:
    """As that of a program of several threads, which nobody interrupts."""
    job = cut_off(place, "after", "sleep 1000", target="waiting")
    job.record.append("cancel", host="another-host", pid=1)
    assert job.wait(120).state is State.CANCELLED


def test_the_job_of_a_sweep_is_found_as_its_part_of_the_array(place: Place) -> None:
    """Of a sweep whose submit was cut off when Slurm had it: the first job's directory has the array's number."""
    store = place.store
    target = resolve_target("slurm", store.jobs).target
    assert isinstance(target, SlurmTarget)
    specs = [JobSpec(argv=(word,), entry="command", code=str(place.here)) for word in ("a", "b", "c")]
    ids = [store.new_id() for _ in specs]
    for job_id, spec, plan in zip(ids, specs, target.plan_many(specs, ids), strict=True):
        record = store.create(job_id, spec, plan, target="slurm", kind="slurm", options={})
        (record.directory / "slurm").mkdir()
        (record.directory / "slurm/spec.json").write_text(json.dumps(spec.to_json()))
    (store.jobs / ids[0] / "slurm/submitted.json").write_text(json.dumps({"slurm": "74_0", "first": ids[0], "at": 1.0}))
    found = [target.find(job_id) for job_id in ids]
    assert [each.native_id for each in found if each] == [f"74_{at}/{job_id}" for at, job_id in enumerate(ids)]


def test_an_empty_name_is_refused(place: Place) -> None:
    assert main(["submit", "--name=", "--no-python", "true"]) == exit_status.USAGE
    with pytest.raises(SpecError, match="name must be one printable line, not ''"):
        submit("true", entry="command", name="", target="shell")
    assert list_jobs() == []
