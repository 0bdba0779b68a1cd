"""Which snapshots `accel prune` deletes, and that none is deleted under a submit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from schedulers.errors import StoreError
from schedulers.job import JobSpec, State, Status
from schedulers.jobs import handle
from schedulers.store.record import Record
from schedulers.store.snapshot import Snapshot, pack, prune_snapshots
from schedulers.store.store import Store

from .test_store import FINAL, create

DAY = 86400.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def packed(store: Store, text: str, *, days: float = 0.0) -> Snapshot:
    """A snapshot that was last used so many days ago."""
    code = store.home.parent / f"code {text}"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text(text)
    snapshot = pack(code, store.home)
    age(snapshot.path, days)
    return snapshot


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY
    os.utime(path, (then, then))


def naming(record: Record, snapshot: Snapshot) -> None:
    (record.directory / "local").mkdir()
    (record.directory / "local/snapshot").write_text(str(snapshot.path))


def submitted(store: Store, *, days: float) -> Record:
    """A job that was submitted so many days ago."""
    record = create(store)
    events = record.directory / "events.jsonl"
    text = events.read_text()
    events.write_text(text.replace(f'"created_at":{record.created_at}', f'"created_at":{time.time() - days * DAY}'))
    assert events.read_text() != text
    return record.reload()


def pruned(store: Store, *, dry_run: bool = False) -> list[str]:
    return prune_snapshots(store.home, store.records(), dry_run=dry_run)


def test_what_was_not_used_for_a_day_goes(store: Store) -> None:
    assert pruned(store) == []
    fresh, old = packed(store, "fresh", days=0.9), packed(store, "old", days=1.1)
    assert pruned(store, dry_run=True) == [old.digest]
    assert old.path.exists()
    assert pruned(store) == [old.digest]
    assert [path for path in (fresh.path, old.path) if path.exists()] == [fresh.path]
    assert pruned(store) == []


def test_what_a_job_names_stays_over_or_not(store: Store) -> None:
    live, over, other = (packed(store, name, days=9) for name in ("live", "over", "other"))
    naming(create(store), live)
    ended = create(store)
    ended.update(FINAL)
    naming(ended, over)
    assert pruned(store) == [other.digest]
    store.prune(keep=0)
    assert pruned(store) == [over.digest]
    assert live.path.exists()


def test_what_was_packed_since_a_live_job_was_submitted_stays(store: Store) -> None:
    """Whatever its target, and whatever that keeps where: the job may use it."""
    job = submitted(store, days=5)
    before, since = packed(store, "before", days=6), packed(store, "since", days=4.9)
    job.update(Status(state=State.RUNNING))
    assert pruned(store) == [before.digest]
    job.update(FINAL)
    assert pruned(store) == [since.digest]


def test_a_job_that_cannot_be_read_may_be_at_work(store: Store) -> None:
    job = create(store)
    (job.directory / "events.jsonl").write_text("rubbish\n")
    age(job.directory / "plan.json", 5)
    before, since = packed(store, "before", days=6), packed(store, "since", days=4.9)
    named = packed(store, "named", days=9)
    naming(job, named)
    assert pruned(store) == [before.digest]
    assert since.path.exists()
    assert named.path.exists()


def test_a_submit_that_finds_it_packed_keeps_it(store: Store) -> None:
    """Before its job is in the list, and when it comes between the look and the deletion."""
    old = packed(store, "old", days=9)
    seen = store.records()
    assert pack(store.home.parent / "code old", store.home) == old
    assert prune_snapshots(store.home, seen) == []
    assert old.path.exists()


def test_submits_and_prunes_at_once_lose_no_snapshot(store: Store) -> None:
    """Each submit finds its snapshot old, and must find it there when it has its answer."""
    code = store.home.parent / "code x"
    path = packed(store, "x").path
    child = os.fork()
    if child == 0:
        try:
            while True:
                prune_snapshots(store.home, [])
        finally:
            os._exit(1)
    try:
        for _ in range(300):
            age(path, 9) if path.exists() else None
            assert pack(code, store.home).path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_what_crashes_left_goes_and_nothing_else(store: Store) -> None:
    old = packed(store, "old", days=9)
    for name in (f"{old.digest}.tar.12.ab34cd56", "notes.txt", "mine.tar"):
        (store.home / "snapshots" / name).touch()
        age(store.home / "snapshots" / name, 9)
    half = store.home / "snapshots" / f"{old.digest}.tar.13.ab34cd56"
    half.touch()
    assert pruned(store) == [old.digest]
    left = set(os.listdir(store.home / "snapshots")) - {".lock"}
    assert left == {half.name, "notes.txt", "mine.tar"}


def test_a_job_whose_snapshot_cannot_be_known_stops_it(store: Store) -> None:
    old = packed(store, "old", days=9)
    (create(store).directory / "local/snapshot").mkdir(parents=True)
    with pytest.raises(StoreError, match="local/snapshot"):
        pruned(store)
    assert old.path.exists()


def test_a_local_job_names_its_snapshot(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCEL_CONFIG_HOME", str(tmp_path / "no-config"))
    code = tmp_path / "project"
    code.mkdir()
    spec = JobSpec(argv=("true",), entry="command", code=str(code), options={"snapshot": True})
    job = handle.submit_spec(spec, "local", store, start=code)
    job.wait(120)
    (snapshot,) = (store.home / "snapshots").glob("*.tar")
    age(snapshot, 9)
    assert pruned(store) == []
    store.prune(keep=0)
    assert pruned(store) == [snapshot.stem]
