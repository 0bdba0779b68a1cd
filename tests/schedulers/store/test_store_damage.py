"""What a crash, a full disk, a newer accel or a foreign hand does to a job: an error for that job, and for no other."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers.errors import StoreError
from schedulers.job import State, Status
from schedulers.store import atomic_files
from schedulers.store.store import CorruptRecord, Record, Store

from .test_store import ROOT, create, store

__all__ = ["store"]

RUNNING = Status(state=State.RUNNING, observed_at=5.0)


def events(record: Record) -> Path:
    return record.directory / "events.jsonl"


NEWER = '{"schema":2,"event":"submitting","name":"a"}\n'
DAMAGE = {
    "empty": (b"", "it holds no record"),
    "a torn first line": (b'{"schema":1,"ev', "it holds no record"),
    "not JSON": (b"rubbish\n", "line 1 is not a record"),
    "zeros": (b"\0" * 4096 + b"\n", "line 1 is not a record"),
    "not UTF-8": (b'{"schema":1,"event":"\xff"}\n', "line 1 is not a record"),
    "a list": (b"[1]\n", "line 1 is not a record"),
    "deep": (b"[" * 100_000 + b"\n", "line 1 is not a record"),
    "no schema": (b'{"event":"submitting"}\n', "its schema is None, not a number"),
    "odd schema": (b'{"schema":true}\n', "its schema is True, not a number"),
    "newer": (NEWER.encode(), "is from a newer accel (schema 2, not 1): upgrade accel to read it"),
    "a field is missing": (b'{"schema":1,"event":"submitting"}\n', "no 'status'"),
    "no event": (b'{"schema":1,"status":{"state":"queued"}}\n', "no 'event'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_job_is_listed_with_its_reason_and_left_alone(store: Store, damage: str) -> None:
    content, said = DAMAGE[damage]
    record, other = create(store), create(store)
    events(record).write_bytes(content)
    found = store.records()
    assert [type(job) for job in found] == [Record, CorruptRecord]
    assert found[0].id == other.id
    assert isinstance(found[1], CorruptRecord)
    assert said in found[1].reason
    assert "\n" not in found[1].reason
    for change in (lambda: record.update(RUNNING), lambda: record.append("note"), record.reload):
        with pytest.raises(StoreError) as raised:
            change()
        assert said in str(raised.value)
    assert events(record).read_bytes() == content


def test_values_of_the_wrong_type_are_damage(store: Store) -> None:
    for number, (key, value) in enumerate({"name": 3, "nodes": "x", "pid": None, "status": "queued"}.items()):
        record = create(store)
        row = json.loads(events(record).read_text()) | {key: value}
        events(record).write_text(json.dumps(row) + "\n")
        assert sum(isinstance(job, CorruptRecord) for job in store.records()) == number + 1


@pytest.mark.parametrize("value", ["1e300", "1e999", "NaN", "-1", "253402300800", "true", '"now"'])
@pytest.mark.parametrize("key", ["created_at", "at", "nodes", "observed_at", "attempt"])
def test_a_number_that_is_none_is_damage(store: Store, key: str, value: str) -> None:
    if (key, value) in (("nodes", "253402300800"), ("attempt", "253402300800")):
        return  # large, and a number of nodes
    record, other = create(store), create(store)
    changed, count = re.subn(rf'"{key}":[^,}}]+', f'"{key}":{value}', events(record).read_text())
    assert count >= 1
    events(record).write_text(changed)
    whole, damaged = store.records()
    assert (type(whole), whole.id) == (Record, other.id)
    assert isinstance(damaged, CorruptRecord)
    assert "events.jsonl is damaged: " in damaged.reason


def test_a_state_that_is_not_known_is_not_over(store: Store) -> None:
    record = create(store)
    record.update(RUNNING)
    events(record).write_text(events(record).read_text().replace('"running"', '"hibernating"'))
    status = store.record(record.id).status
    assert (status.state, status.message) == (State.UNKNOWN, "state 'hibernating' was written by a newer accel")


def test_a_missing_file_is_named(store: Store) -> None:
    record = create(store)
    (record.directory / "spec.json").unlink()
    with pytest.raises(StoreError, match=r"spec.json is missing"):
        record.spec()
    events(record).unlink()
    with pytest.raises(StoreError, match=r"events.jsonl is missing"):
        store.record(record.id)
    with pytest.raises(StoreError, match="not found"):
        record.update(RUNNING)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema":7}', '{"schema":"1"}', "{}"])
def test_a_damaged_or_newer_document_is_never_overwritten(store: Store, content: str) -> None:
    record = create(store)
    path = record.directory / "exit.json"
    path.write_text(content)
    with pytest.raises(StoreError, match=r"exit.json"):
        record.read_exit()
    with pytest.raises(StoreError, match=r"exit.json"):
        atomic_files.write_document(f"{record.path}/exit.json", {"exit_code": 0})
    assert path.read_text() == content


def test_a_spec_that_is_none_is_damage(store: Store) -> None:
    record = create(store)
    (record.directory / "spec.json").write_text('{"schema":1,"spec":{"argv":[]}}')
    with pytest.raises(StoreError, match=r"spec.json is damaged: .*nothing to run"):
        record.spec()


def test_a_torn_record_is_none_and_loses_no_other(store: Store) -> None:
    """A writer that dies leaves a line without its end: cut at every byte, and again in what the next one wrote."""
    record = create(store)
    record.update(RUNNING, "n")
    whole = events(record).read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole) + 1):
        events(record).write_bytes(whole[:cut])
        state = State.RUNNING if cut == len(whole) else State.SUBMITTING
        assert store.record(record.id).status.state is state
        record.append("first")
        after_first = events(record).read_bytes()
        assert after_first.startswith(whole[:cut])
        assert record.status.state is state
        for second_cut in {cut + 1, cut + 5, len(after_first) - 1}:
            events(record).write_bytes(after_first[:second_cut])
            assert store.record(record.id).status.state is state
            record.append("second")
            assert events(record).read_bytes().startswith(after_first[:second_cut])
            names = [event.name for event in record.reload().events()]
            assert names == ["submitting", *["status"] * (state is State.RUNNING), "second"]


def test_a_damaged_line_in_the_middle_is_damage(store: Store) -> None:
    record = create(store)
    record.update(RUNNING)
    record.append("note")
    lines = events(record).read_bytes().splitlines(keepends=True)
    events(record).write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(StoreError, match="line 2 is not a record"):
        store.record(record.id)


APPENDER = """
import sys
from schedulers.store.store import Store
record = Store(sys.argv[1]).record(sys.argv[2])
while True:
    record.append("note", text="x" * 3000)
    print(flush=True)
"""


def test_writers_that_are_killed_leave_a_readable_job(store: Store) -> None:
    record = create(store)
    confirmed = 0
    for lines in range(1, 13):
        with subprocess.Popen(
            [sys.executable, "-c", APPENDER, str(store.home), record.id], cwd=ROOT, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for _ in range(lines):
                child.stdout.readline()
            child.kill()
            confirmed += lines + len(child.stdout.read().splitlines())
        written = [event.data["text"] for event in store.record(record.id).events()[1:]]
        assert len(written) >= confirmed
        assert set(written) == {"x" * 3000}
    assert record.update(RUNNING).state is State.RUNNING


CREATOR = """
import sys
from schedulers.store.store import Store
from schedulers.job import JobSpec
from schedulers.target import Plan
store = Store(sys.argv[1])
while True:
    i = store.new_id()
    store.create(i, JobSpec(argv=("a" * 5000,)), Plan(target="t", kind="local", job_id=i), target="t", kind="local")
    print(i, flush=True)
"""


def test_a_create_that_is_killed_is_whole_or_not_there(store: Store) -> None:
    confirmed: set[str] = set()
    for lines in range(1, 9):
        with subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(store.home)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            confirmed |= {child.stdout.readline().strip() for _ in range(lines)}
            child.kill()
            confirmed |= {line.strip() for line in child.stdout if line.endswith("\n")}
    found = store.records()
    assert all(isinstance(job, Record) and len(job.spec().argv[0]) == 5000 for job in found)
    assert confirmed <= {job.id for job in found}


def test_a_full_disk_is_said_and_harms_nothing(small_disk: Path) -> None:
    store = Store(small_disk)
    record = create(store)
    record.update(RUNNING, "n")
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    before = events(record).read_bytes()
    # Up to the end of its last page, the file may still grow.
    with pytest.raises(StoreError, match=r"^disk full: cannot write .*events.jsonl \(No space left on device\); free"):
        record.append("note", text="x" * 8192)
    assert events(record).read_bytes() == before
    with pytest.raises(StoreError, match="disk full"):
        create(store)
    with pytest.raises(StoreError, match=r"disk full: cannot write .*exit.json"):
        atomic_files.write_document(f"{record.path}/exit.json", {"exit_code": 0})
    assert record.read_exit() is None
    assert [job.id for job in store.records()] == [record.id]
    assert sorted(os.listdir(store.jobs)) == [record.id]
    ballast.unlink()
    record.append("note", text="x" * 8192)
    assert [event.name for event in store.record(record.id).events()] == ["submitting", "status", "note"]


def test_a_write_that_is_cut_short_is_taken_back(store: Store) -> None:
    """RLIMIT_FSIZE lets the kernel write the first part of the line."""
    record = create(store)
    before = events(record).read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(StoreError, match="disk full"):
            record.append("note", text="x" * 500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert events(record).read_bytes() == before
    record.append("note")
    assert [event.name for event in record.events()] == ["submitting", "note"]


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root may do everything, so these tests give that up for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that everybody can reach: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_no_permission_is_said(open_place: Path) -> None:
    store = Store(open_place / "home")
    record = create(store)
    closed, open_one = create(store), create(store)
    if os.geteuid() == 0:
        for job in (record, open_one):
            os.chown(job.path, 65534, 65534)
            os.chown(events(job), 65534, 65534)
        store.jobs.chmod(0o755)
        store.home.chmod(0o755)
    events(closed).chmod(0)
    events(record).chmod(0o400)
    with as_somebody_else():
        found = store.records()
        assert [type(job) for job in found] == [Record, CorruptRecord, Record]
        assert isinstance(found[1], CorruptRecord)
        assert "no permission to read" in found[1].reason
        with pytest.raises(StoreError, match=r"^no permission to write .*events.jsonl \(Permission denied\)$"):
            record.update(RUNNING)
    if os.geteuid() == 0:
        with as_somebody_else(), pytest.raises(StoreError, match="no permission to write"):
            create(store)
        store.jobs.chmod(0o700)
        with as_somebody_else(), pytest.raises(StoreError, match="no permission to read"):
            store.records()


def test_other_refusals_say_what_the_system_said() -> None:
    said = atomic_files.store_error(OSError(errno.EIO, os.strerror(errno.EIO)), "/x", "read")
    assert str(said) == "cannot read /x: Input/output error"
