"""Jobs that a backend has taken: only the backend ends them, and those that may still run are not pruned."""

from __future__ import annotations

import json
import os

import pytest

from schedulers.errors import SubmitError, Unreachable
from schedulers.job import Reason, State, Status
from schedulers.jobs import submit
from schedulers.jobs.handle import Job, find
from schedulers.jobs.prune import prune
from schedulers.store import atomic_files
from schedulers.target import Plan

from .test_backends import elsewhere, forget_backend
from .test_handle import Place, place, release, released

__all__ = ["place"]

LOST = Status(state=State.FAILED, reason=Reason.LOST)
SUCCEEDED = Status(state=State.SUCCEEDED, exit_code=0)


def test_a_job_that_started_in_part_has_failed_once_that_part_has_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SubmitError, match="a part of it is refused"):
        place.sh(released(place.here / "gate"), "finding", part=True)
    assert find("@last").record.status.reason is Reason.SETUP
    assert "poll" in {call.split()[0] for call in place.calls()}

    (place.home / "stubborn").touch()
    monkeypatch.setattr(submit, "_END_S", 1.0)
    with pytest.raises(Unreachable, match=r"a part of it is refused; n-\w+ has not ended; job \w+ is kept as queued"):
        place.sh(released(place.here / "gate2"), "finding", part=True)
    job = find("@last")
    assert not job.status().state.final
    (place.home / "stubborn").unlink()
    submitter_ends(job)
    job.status()  # cancels it
    assert job.status().state is State.CANCELLED


def test_a_target_that_does_not_answer_after_it_refused_a_part(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedulers.jobs import poll

    def fails(*_: object) -> None:
        raise Unreachable("the shell does not answer")

    with monkeypatch.context() as silent:
        silent.setattr(poll, "poll_target", fails)
        with pytest.raises(Unreachable, match=r"n-\w+ may still run: the shell does not answer"):
            place.sh("true", "finding", part=True)
    job = find("@last")
    submitter_ends(job)
    assert job.status().state in (State.CANCELLED, State.SUCCEEDED)


def test_what_still_runs_is_kept_whatever_its_status(place: Place) -> None:
    jobs = [place.sh(released(place.here / name), "identified") for name in "abc"]
    recorded = [LOST, SUCCEEDED, Status(state=State.FAILED, reason=Reason.SETUP)]
    for job, status in zip(jobs, recorded, strict=True):
        job.record.update(status)
    (place.home / "calls").unlink()
    pruned = prune(place.store, keep=0, dry_run=True)
    assert pruned.ids == ()
    assert sorted(pruned.kept_reasons) == [f"job {job.id} is kept: it still runs: in the shell" for job in jobs]
    assert [call.split()[0] for call in place.calls()] == ["running", "backends"]  # one for all
    for name in "abc":
        release(place.here / name)
    ended(place, jobs)
    assert set(prune(place.store, keep=0).ids) == {job.id for job in jobs}


@pytest.mark.long
def test_ten_thousand_jobs_are_one_question(place: Place) -> None:
    job = place.sh("true", "identified")
    job.wait(60)
    record, store = job.record, place.store
    plan = Plan.from_json(json.loads((record.directory / "plan.json").read_text())["plan"])
    for _ in range(9_999):
        job_id = store.new_id()
        stored = store.create(
            job_id, job.spec, plan, native_id=f"n-{job_id}",
            target=record.target, kind=record.kind, backend=record.backend,
        )  # fmt: skip
        stored.update(SUCCEEDED)
    (place.home / "calls").unlink()
    pruned = prune(store, keep=0)
    assert (len(pruned.ids), pruned.kept_reasons) == (10_000, ())
    assert [call.split()[0] for call in place.calls()] == ["running"]


@pytest.mark.parametrize("silent", ["unreachable", "other"])
def test_who_cannot_be_asked_keeps_the_jobs_whose_end_nobody_stated(place: Place, silent: str) -> None:
    jobs = [place.sh("true", "identified") for _ in range(4)]
    lost, _, unidentified, with_exit = jobs
    forget_backend(unidentified)
    forget_backend(with_exit)
    atomic_files.write_document(f"{with_exit.record.path}/exit.json", {"state": "succeeded", "exit_code": 0})
    ended(place, jobs)
    for job in jobs:
        job.record.update(LOST if job is lost else SUCCEEDED)
    if silent == "other":
        elsewhere(place)
    else:
        (place.home / "unreachable").touch()
    kept = [lost] if silent == "other" else [lost, unidentified]  # which takes the backend that there is for its own
    pruned = prune(place.store, keep=0)
    assert set(pruned.ids) == {job.id for job in jobs if job not in kept}
    assert len(pruned.kept_reasons) == len(kept)
    for line in pruned.kept_reasons:
        assert "its end is not confirmed, and it may still run" in line
        assert ("is now shell=two" if silent == "other" else "the shell does not answer") in line
        assert "accel prune --force" in line
    (place.home / "unreachable").unlink(missing_ok=True)
    (place.home / "backend").unlink(missing_ok=True)
    assert set(prune(place.store, keep=0).ids) == {job.id for job in kept}


def submitter_ends(job: Job) -> None:
    """Record another process than this one, which has ended, as the job's submitter."""
    path = job.record.directory / "events.jsonl"
    path.write_text(path.read_text().replace(f'"pid":{os.getpid()}', '"pid":4194303'))


def ended(place: Place, jobs: list[Job]) -> None:
    """Wait until the processes of these jobs have left their results."""
    from tests.waiting import until

    until(lambda: all((job.record.directory / "shell/code").exists() for job in jobs), "they have ended")


def test_what_runs_is_kept_where_the_backend_cannot_be_identified(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .test_handle_target import IdentifiedShellTarget

    def fails(*_: object) -> None:
        raise Unreachable("the controller does not answer")

    lost, failed = (place.sh(released(place.here / name), "identified") for name in "ab")
    lost.record.update(LOST)
    failed.record.update(Status(state=State.FAILED, reason=Reason.SETUP))
    monkeypatch.setattr(IdentifiedShellTarget, "backends", fails)
    assert prune(place.store, keep=0).ids == ()
    for name in "ab":
        release(place.here / name)
    ended(place, [lost, failed])
    pruned = prune(place.store, keep=0)
    assert pruned.ids == (failed.id,)
    assert "cannot tell which backend it uses now" in pruned.kept_reasons[0]
