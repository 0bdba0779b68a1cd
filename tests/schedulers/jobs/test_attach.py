"""Records of jobs that another machine submitted, and waiting on a target that says when there is no news."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from schedulers import (
    Job,
    JobSpec,
    LogLine,
    Plan,
    SchedulerError,
    State,
    Status,
    Store,
    StoreError,
    UnknownJob,
    Unreachable,
    find,
)
from schedulers.jobs.attach import find_or_attach
from schedulers.ssh.target import SshOptions
from schedulers.store.store import created_at, full_id
from schedulers.target import DiscoveredJob


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def adopted(store: Store, job_id: str) -> Job:
    plan = Plan(target="lab", kind="ssh", job_id=job_id)
    spec = JobSpec(argv=("train.py",), name="far away", nodes=2)
    return Job(store.create(job_id, spec, plan, target="lab", kind="ssh", options={}, native_id=f"a,b/{job_id}"))


def test_the_record_of_a_job_that_another_machine_submitted(store: Store) -> None:
    job_id = store.new_id()
    record = adopted(store, job_id).record
    assert (record.adopted, record.native_id, record.status.state) == (True, f"a,b/{job_id}", State.QUEUED)
    assert record.status.observed_at == 0.0
    assert abs(record.created_at - time.time()) < 60
    assert [event.name for event in record.events()] == ["adopted"]
    assert record.update(Status(state=State.RUNNING)).state is State.RUNNING
    again = store.record(job_id)
    assert (again.adopted, again.native_id, again.status.state) == (True, f"a,b/{job_id}", State.RUNNING)
    assert again.submitter == (os.uname().nodename, os.getpid())
    with pytest.raises(StoreError, match="exists already"):
        adopted(store, job_id)
    with pytest.raises(ValueError, match="event of the store's own"):
        record.append("adopted")


def test_a_job_whose_id_holds_no_time_was_made_when_its_target_says(store: Store) -> None:
    """Ids of helm/accel-job are hashes after a 0. Jobs are listed by their time all the same."""
    ids = []
    for at in (None, 1.0, 3.0, 2.0):
        job_id = store.new_id() if at is None else f"0{at:.0f}aaaaaaaaa"
        plan, spec = Plan(target="lab", kind="ssh", job_id=job_id), JobSpec(argv=("train.py",))
        made_at = None if at is None else time.time() + at * 60
        record = store.create(job_id, spec, plan, target="lab", kind="ssh", native_id=job_id, made_at=made_at)
        assert made_at is None or record.created_at == made_at
        ids.append(job_id)
    assert store.ids() == [ids[2], ids[3], ids[1], ids[0]]
    assert store.resolve("@last") == ids[2]
    later = store.new_id()
    assert later > max(ids)  # so new ids come before what was made earlier, and sort by text alone
    (store.jobs / ids[1] / "events.jsonl").write_text("damaged")
    assert set(store.ids()) == set(ids)


def test_whole_ids(store: Store) -> None:
    job_id = store.new_id()
    assert full_id(job_id) == full_id(job_id.upper()) == job_id
    assert full_id("2mxil0o0000") == "2mx11000000"
    assert [full_id(ref) for ref in ("@last", job_id[:-1], job_id + "0", "2mxu0000000", "")] == [None] * 5
    assert created_at("2mxh4k0r7ab") < created_at("2mxh4k1r7ab") < time.time() + 366 * 86400
    assert abs(created_at(job_id) - time.time()) < 60


def test_what_is_said_of_a_job_that_is_not_known_here(store: Store) -> None:
    with pytest.raises(UnknownJob, match="accel status 2mxh4k0r7ab --target NAME looks for it there"):
        find("2mxh4k0r7ab", store)
    with pytest.raises(UnknownJob, match="to find it on target lab, give its full id"):
        find("2mxh", store, target="lab")


def test_a_later_object_of_the_same_name_takes_the_place_of_a_job_that_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `helm install` makes it of the same values after `helm uninstall`. Who names the target gets the new job."""
    job_id, spec, now = "0aaaaaaaaaa", JobSpec(argv=("train.py",)), time.time()
    plan = Plan(target="lab", kind="kubernetes", job_id=job_id)
    there: list[DiscoveredJob | SchedulerError] = []

    class Cluster:
        def find(self, job_id: str) -> DiscoveredJob | None:
            found = there.pop()
            if isinstance(found, SchedulerError):
                raise found
            return found

    resolved = SimpleNamespace(name="lab", kind="kubernetes", options={}, source="", target=Cluster())
    monkeypatch.setattr("schedulers.config.named_targets.resolve_target", lambda *_, **__: resolved)
    first, second = (
        DiscoveredJob(native_id=f"job/team/run1/{job_id}/{uid}", spec=spec, plan=plan, created_at=now + later_s)
        for uid, later_s in (("u-1", 0), ("u-2", 60))
    )
    there.append(first)
    record, _ = find_or_attach(job_id, store, "lab", {})
    assert find_or_attach(job_id, store, "lab", {})[0].native_id == first.native_id  # not over: not looked for
    record.update(Status(state=State.SUCCEEDED))
    for answer in (first, Unreachable("no")):
        there.append(answer)
        assert find_or_attach(job_id, store, "lab", {})[0].status.state is State.SUCCEEDED
    assert find_or_attach(job_id, store, None, {})[0].status.state is State.SUCCEEDED
    there.append(second)
    record, _ = find_or_attach(job_id, store, "lab", {})
    assert (record.native_id, record.status.state) == (second.native_id, State.QUEUED)
    assert store.record(job_id).native_id == second.native_id


class Quiet:
    """A target that has news of its job when it is asked to wait for the third time."""

    Options: ClassVar[type] = SshOptions
    name = "quiet"

    def __init__(self) -> None:
        self.waits, self.polls = 0, 0

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        self.polls += 1
        return dict.fromkeys(native_ids, Status(state=State.RUNNING if self.waits < 3 else State.SUCCEEDED))

    def wait(self, native_id: str, timeout_s: float) -> bool:
        self.waits += 1
        return self.waits >= 3

    def logs(self, native_id: str, since: Any = None) -> Iterator[LogLine]:
        return iter(())


def test_a_target_that_has_no_news_is_not_polled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedulers.jobs.follow._FIRST_POLL_S", 600.0)
    target = Quiet()
    job = adopted(store, store.new_id())
    job._cached_target = target  # type: ignore[assignment]
    assert job.wait(60).state is State.SUCCEEDED
    assert (target.waits, target.polls) == (3, 2)
