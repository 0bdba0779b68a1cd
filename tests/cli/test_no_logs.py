"""`accel logs` of a job that has not started, and of one that never reached its target."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from accel.cli import exit_status, main
from schedulers import JobSpec, Reason, State, Status, SubmitError, find
from schedulers.store.record import Record
from schedulers.store.store import Store
from schedulers.target import Plan
from tests.waiting import until


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A job whose submit goes on, in this process."""
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path))
    store, spec = Store.default(), JobSpec(argv=("train.py",), code=str(tmp_path))
    job_id = store.new_id()
    plan = Plan(target="local", kind="local", job_id=job_id)
    return store.create(job_id, spec, plan, target="local", kind="local", options={})


def test_a_job_that_has_not_started_says_so(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", record.id]) == exit_status.OK
    assert capsys.readouterr() == ("", f"accel: job {record.id} is submitting\n")
    record.update(Status(state=State.QUEUED, message="waits for 1 of 2 processors"), record.id)
    assert main(["logs", record.id]) == exit_status.OK
    assert capsys.readouterr() == ("", f"accel: job {record.id} is queued: waits for 1 of 2 processors\n")


def test_a_job_that_never_reached_its_target_is_an_error(record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    record.update(Status(state=State.FAILED, reason=Reason.SETUP, message="no such partition"))
    for argv in (["logs", record.id], ["logs", "-f", record.id]):
        assert main(argv) == exit_status.ERROR
        said = f"accel logs: job {record.id} has no logs: failed before local accepted it: no such partition\n"
        assert capsys.readouterr() == ("", said)


def test_following_waits_for_the_submit(record: Record) -> None:
    raised: list[str] = []

    def follow() -> None:
        with pytest.raises(SubmitError) as error:
            list(find(record.id).logs(follow=True))
        raised.append(str(error.value))

    reader = threading.Thread(target=follow)
    reader.start()
    until((record.directory / "submit.lock").exists, "the reader has asked for the status")
    record.update(Status(state=State.CANCELLED, reason=Reason.USER))
    reader.join(60)
    assert raised == [f"job {record.id} has no logs: cancelled before local accepted it"]
