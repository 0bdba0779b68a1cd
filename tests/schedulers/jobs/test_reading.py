"""Commands that ask work on a store that cannot be written, and with what a newer accel wrote."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from accel.cli import exit_status, main
from schedulers.errors import ConfigError, StoreNotWritable
from schedulers.job import Reason, State, Status
from schedulers.jobs.handle import find, list_jobs
from schedulers.store import atomic_files
from schedulers.store.record import Record
from tests.waiting import until

from .test_handle import Place, place, release, released, texts

__all__ = ["place"]


def unwritable(*_: object, **__: object) -> None:
    """As the system on a full or read-only disk. Root's permissions would hide a directory without write access."""
    raise StoreNotWritable("disk full: cannot write events.jsonl")


def test_a_store_that_cannot_be_written_is_read_and_jobs_are_cancelled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = place.sh(f"echo 0 up; {released(place.here / 'gate')}", "finding")
    other = place.sh(released(place.here / "gate2"), "finding")
    monkeypatch.setattr(atomic_files, "append_line", unwritable)
    assert job.status().state is State.RUNNING  # it was recorded as queued
    assert job.record.warning == "not recorded: disk full: cannot write events.jsonl"
    assert [record.status.state for record in list_jobs() if isinstance(record, Record)] == [State.RUNNING] * 2
    assert texts(list(job.logs())) == "0 up\n"
    assert job.describe()["status"]["state"] == "queued"
    assert other.cancel().state is State.CANCELLED
    assert other.record.warning == "the request is not recorded: disk full: cannot write events.jsonl"
    waiting = threading.Timer(0.2, release, [place.here / "gate"])
    waiting.start()
    assert job.wait(60).state is State.SUCCEEDED
    monkeypatch.undo()
    monkeypatch.setenv("ACCEL_HOME", str(place.home))
    assert find(job.id).record.status.state is State.QUEUED


def test_no_news_take_no_lock(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate), "identified")
    assert job.status().state is State.RUNNING
    calls: list[str] = []
    append = atomic_files.append_line

    def counted(path: str, *rest: Any, **more: Any) -> Any:
        calls.append(path)
        return append(path, *rest, **more)

    monkeypatch.setattr(atomic_files, "append_line", counted)
    job.status()
    list_jobs()
    assert calls == []
    release(gate)
    assert job.wait(60).state is State.SUCCEEDED
    assert len(calls) == 1


@pytest.mark.parametrize("key", ["state", "reason"])
def test_what_only_a_newer_accel_knows(place: Place, key: str, capfd: pytest.CaptureFixture[str]) -> None:
    gate = place.here / "gate"
    job = place.sh(f"echo 0 up; {released(gate)}", "finding")
    assert job.status().state is State.RUNNING
    path = job.record.directory / "events.jsonl"
    row = json.loads(path.read_text().splitlines()[-1])
    row["status"][key] = "paused"
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    status = find(job.id).record.status
    assert f"{key} 'paused' was written by a newer accel" in status.message
    assert not status.state.final
    assert texts(list(find(job.id).logs())) == "0 up\n"
    assert find(job.id).cancel().state is State.CANCELLED


def test_an_unknown_state_is_kept_as_such() -> None:
    status = Status.from_json({"state": "paused", "reason": "weather", "message": "wet"})
    assert (status.state, status.reason) == (State.UNKNOWN, Reason.UNKNOWN)
    assert (
        status.message
        == "reason 'weather' was written by a newer accel; state 'paused' was written by a newer accel; wet"
    )
    assert Status.from_json(status.to_json()) == status
    with pytest.raises(ValueError, match="is not a valid State"):
        Status.from_json({"state": 3})


def test_stored_options_of_a_newer_accel_are_ignored(place: Place) -> None:
    job = place.sh("true", "finding")
    path = job.record.directory / "target.json"
    document = json.loads(path.read_text())
    document["options"]["colour"] = "blue"
    path.write_text(json.dumps(document))
    assert find(job.id).wait(60).state is State.SUCCEEDED
    with pytest.raises(ConfigError, match="no such option"):
        place.sh("true", "finding", colour="blue")


def test_expired_credentials(place: Place, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = place.here / "gate"
    job = place.sh(released(gate), "identified")
    assert job.status().state is State.RUNNING
    (place.home / "expired").touch()
    (place.here / "train.py").touch()
    assert main(["status", job.id]) == exit_status.OK
    out = capfd.readouterr().out
    assert "running" in out
    assert "the login has expired: sign in again" in out
    assert main(["submit", "--target", "identified", "train.py"]) == exit_status.USAGE
    assert "the login has expired: sign in again" in capfd.readouterr().err
    assert [record.id for record in list_jobs(refresh=False)] == [job.id]
    waiting = threading.Thread(target=lambda: main(["wait", job.id]), daemon=True)
    waiting.start()
    told: list[str] = []

    def reported() -> bool:
        told.append(capfd.readouterr().err)
        return "the login has expired" in "".join(told)

    until(reported, "wait says so")
    assert f"job {job.id} was running " in "".join(told)
    (place.home / "expired").unlink()
    release(gate)
    waiting.join(60)
    assert not waiting.is_alive()


def test_a_prune_reads_each_record_once(place: Place) -> None:
    jobs = [place.sh("true", "finding") for _ in range(3)]
    assert {job.wait(60).state for job in jobs} == {State.SUCCEEDED}
    hook = (
        "import collections, os, sys\n"
        "reads = collections.Counter()\n"
        "def count(event, args):\n"
        "    if event == 'open' and str(args[0]).endswith('/events.jsonl'):\n"
        "        reads[os.path.basename(os.path.dirname(args[0]))] += 1\n"
        "sys.addaudithook(count)\n"
        "from accel.cli import main\n"
        "main(['prune', '--keep', '1'])\n"
        "print(*reads.items(), sep='\\n')"
    )
    completed = place.python(hook)
    newest, *older = sorted((job.id for job in jobs), reverse=True)
    assert completed.stdout.splitlines()[:2] == older, completed.stderr
    assert sorted(completed.stdout.splitlines()[2:]) == [str((job_id, 1)) for job_id in sorted([newest, *older])]


def test_a_cancel_of_many_jobs_polls_each_backend_once(place: Place) -> None:
    jobs = [place.sh(released(place.here / name), "finding") for name in "abc"]
    (place.home / "calls").unlink()
    assert main(["cancel", "--no-wait", *(job.id for job in jobs)]) == exit_status.OK
    calls = [call.split()[0] for call in place.calls()]
    assert (calls.count("poll"), calls.count("cancel")) == (1, 3)
    assert {job.status().state for job in jobs} == {State.CANCELLED}
