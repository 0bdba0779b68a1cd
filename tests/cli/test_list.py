"""`accel list`: what it reads and polls for the jobs that it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accel.cli import exits, main
from schedulers import disk
from schedulers.job import JobSpec, State, Status
from schedulers.store import Record, Store
from schedulers.target import Plan

List = Callable[..., dict[str, Any]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    return Store.default()


@pytest.fixture
def listed(store: Store, capsys: pytest.CaptureFixture[str]) -> List:
    def listed(*argv: str) -> dict[str, Any]:
        assert main(["list", "--json", *argv]) == exits.OK
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return listed


def running(store: Store) -> Record:
    """A job of the local target that has no supervisor: a poll does not know it, and notes that in its record."""
    job_id = store.new_id()
    plan = Plan(target="local", kind="local", job_id=job_id)
    record = store.create(job_id, JobSpec(argv=("a.py",)), plan, target="local", kind="local", options={})
    record.update(Status(state=State.RUNNING, observed_at=1.0), job_id)
    return record


def polled(store: Store) -> set[str]:
    records = [record for record in store.records() if isinstance(record, Record)]
    return {record.id for record in records if record.absent_since is not None}


def test_only_the_shown_jobs_are_read_and_polled(store: Store, listed: List, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [running(store).id for _ in range(7)][::-1]
    read: set[str] = set()
    read_bytes = disk.read_bytes

    def noting(path: str) -> bytes | None:
        read.add(Path(path).parent.name)
        return read_bytes(path)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "read_bytes", noting)
        found = listed("--limit", "2")
    assert ([job["id"] for job in found["jobs"]], found["older"]) == (ids[:2], 5)
    assert read == polled(store) == set(ids[:2])
    assert listed("--limit", "0") == {"jobs": [], "older": 7}
    assert polled(store) == set(ids[:2])
    assert [job["id"] for job in listed("--all")["jobs"]] == ids
    assert polled(store) == set(ids)


def test_a_filter_counts_the_jobs_that_it_lets_pass(store: Store, listed: List) -> None:
    ids = [running(store).id for _ in range(4)][::-1]
    store.record(ids[1]).update(Status(state=State.SUCCEEDED, exit_code=0))
    found = listed("--state", "running", "--limit", "2")
    assert ([job["id"] for job in found["jobs"]], found["older"]) == ([ids[0], ids[2]], 1)
    assert listed("--target", "elsewhere") == {"jobs": [], "older": 0}


def test_a_damaged_job_is_one_of_those_shown(store: Store, listed: List) -> None:
    ids = [running(store).id for _ in range(3)][::-1]
    (store.jobs / ids[0] / "events.jsonl").write_text("rubbish\n")
    found = listed("--limit", "1")
    assert ([job["state"] for job in found["jobs"]], found["older"]) == (["damaged"], 2)
