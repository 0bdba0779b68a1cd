"""A record knows which backend has its job: another one neither ends it nor takes up its submit."""

from __future__ import annotations

import pytest

from accel.cli import exit_status, main
from schedulers.errors import StoreError, Unreachable
from schedulers.job import Reason, State, Status
from schedulers.jobs.handle import Job, find, list_jobs
from schedulers.jobs.poll import UNIDENTIFIED_S, Answer, apply_poll
from schedulers.jobs.prune import prune
from schedulers.store import atomic_files
from schedulers.store.record import Record
from schedulers.target import same_backend

from .test_handle import Place, before_long_ago, place, release, released
from .test_recovery import cut_off, submits

__all__ = ["place"]

LOST = Status(state=State.FAILED, reason=Reason.LOST, message="another job has its number")


@pytest.mark.parametrize(
    ("recorded", "current", "same"),
    [
        ("cluster=a", "cluster=a", True),
        ("cluster=a", "cluster=b", False),
        ("namespace=1 server=x", "namespace=1 server=y", True),  # the server has another name now
        ("namespace=1 server=x", "namespace=2 server=x", False),
        ("namespace=1 server=x", "server=x", None),  # the namespace cannot be read any more
        ("server=x", "namespace=1 server=x", True),
        ("server=x", "namespace=1 server=y", False),
        ("cluster=a", "", None),
    ],
)
def test_the_first_sort_of_identity_counts(recorded: str, current: str, same: bool | None) -> None:
    assert same_backend(recorded, current) is same


def elsewhere(place: Place) -> None:
    """The name of the target comes to mean another backend, which knows no job of ours."""
    (place.home / "backend").write_text("shell=two")
    (place.home / "forgetful").touch()


def listed() -> Record:
    (record,) = list_jobs()
    assert isinstance(record, Record)
    return record


def test_another_backend_ends_no_job(place: Place) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate), "identified")
    assert job.record.backend == "shell=one"
    elsewhere(place)
    before_long_ago(job, 2 * UNIDENTIFIED_S)
    for _ in range(2):
        assert job.status().state is State.QUEUED
        assert listed().status.state is State.QUEUED
        assert (
            listed().warning
            == job.record.warning
            == (
                f"target identified is now shell=two, and job {job.id} was submitted to shell=one; "
                f"if that is gone for good: accel prune --force {job.id}"
            )
        )
        before_long_ago(job, 2 * UNIDENTIFIED_S)
    assert job.record.absent_since is None
    with pytest.raises(Unreachable, match="is now shell=two"):
        job.cancel()
    assert prune(place.store, keep=0).ids == ()
    for name in ("backend", "forgetful"):
        (place.home / name).unlink()
    assert job.status().state is State.CANCELLED  # which was acted upon here, where both are one


def test_what_another_backend_calls_lost_is_not(place: Place) -> None:
    record = place.sh("true", "identified").record
    with pytest.raises(Unreachable, match=r"is now shell=two, and job .* was submitted to shell=one"):
        apply_poll(record, Answer(at=1.0, status=LOST, backend="shell=two"))
    with pytest.raises(Unreachable, match="cannot tell which backend it uses now"):
        apply_poll(record, Answer(at=1.0, status=LOST))
    assert not record.reload().status.state.final
    assert apply_poll(record, Answer(at=1.0, status=LOST, backend="shell=one")).reason is Reason.LOST


def test_a_job_with_a_result_has_ended_whatever_is_asked(place: Place) -> None:
    job = place.sh("true", "identified")
    elsewhere(place)
    atomic_files.write_document(f"{job.record.path}/exit.json", {"state": "succeeded", "exit_code": 0})
    assert job.status().state is State.SUCCEEDED


def test_a_submit_that_was_cut_off_is_taken_up_by_its_own_backend_alone(place: Place) -> None:
    job = cut_off(place, "before", target="identified")
    elsewhere(place)
    for _ in range(2):
        assert job.status().state is State.SUBMITTING
        assert "is now shell=two" in job.record.warning
        assert submits(place) == 1
    for name in ("backend", "forgetful"):
        (place.home / name).unlink()
    assert job.wait(120).state is State.SUCCEEDED
    assert submits(place) == 2


def test_the_first_backend_that_knows_an_old_record_is_its_own(place: Place) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate), "identified")
    forget_backend(job)
    elsewhere(place)
    for _ in range(2):
        assert job.status().state is State.QUEUED
        assert "so it counts as lost after a day" in job.record.warning
        before_long_ago(job)
    assert job.record.backend == ""
    (place.home / "forgetful").unlink()
    assert job.status().state is State.RUNNING
    assert job.record.backend == find(job.id).record.backend == "shell=two"
    release(gate)
    assert job.wait(120).state is State.SUCCEEDED


@pytest.mark.parametrize("kind", ["identified", "waiting"])
def test_without_a_known_backend_a_job_is_lost_after_a_day_and_kept(place: Place, kind: str) -> None:
    job = place.sh("true", kind)
    forget_backend(job)
    (place.home / "forgetful").touch()
    job.status()
    before_long_ago(job, UNIDENTIFIED_S + 60)
    assert job.status().reason is Reason.LOST
    pruned = prune(place.store, keep=0)
    assert pruned.ids == ()
    assert f"accel prune --force {job.id}" in pruned.kept_reasons[0]
    assert prune(place.store, ids=[job.id], force=True).ids == (job.id,)


def forget_backend(job: Job) -> None:
    """As an older accel has recorded the job."""
    path = job.record.directory / "events.jsonl"
    lines = [line for line in path.read_text().splitlines() if '"event":"backend"' not in line.replace(": ", ":")]
    path.write_text("".join(f"{line}\n" for line in lines).replace(',"backend":"shell=one"', ""))
    assert job.record.reload().backend == ""


def test_a_backend_that_is_gone_for_good(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate), "identified")
    elsewhere(place)
    with pytest.raises(StoreError, match="not over"):
        prune(place.store, ids=[job.id])
    assert main(["prune", "--force"]) == exit_status.USAGE
    assert main(["prune", "--force", job.id]) == exit_status.OK
    out, err = capfd.readouterr()
    assert out == f"{job.id}\n"
    assert f"job {job.id} was queued: it may still run as n-{job.id} on target identified (shell=one)" in err
    assert list_jobs() == []
    release(gate)


def test_sixty_jobs_of_another_backend_are_one_question(place: Place) -> None:
    for _ in range(3):
        place.sh("true", "identified")
    elsewhere(place)
    (place.home / "calls").unlink()
    list_jobs()
    assert sorted(call.split()[0] for call in place.calls()) == ["backends", "poll"]
