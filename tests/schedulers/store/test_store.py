"""The job store: ids, the life of a record, what is refused, and what is deleted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers.errors import SpecError, StoreError, UnknownJob
from schedulers.job import JobSpec, Reason, State, Status
from schedulers.store import atomic_files
from schedulers.store.store import CorruptRecord, Record, Store
from schedulers.target import Plan

from ..test_job import SPECS, STATUSES

FINAL = Status(state=State.SUCCEEDED, exit_code=0, observed_at=9e9)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def create(store: Store, spec: JobSpec | None = None, job_id: str | None = None) -> Record:
    spec, job_id = spec or JobSpec(argv=("train.py",)), job_id or store.new_id()
    plan = Plan(target="lab", kind="local", job_id=job_id)
    return store.create(job_id, spec, plan, target="lab", kind="local", options={"slots": 2})


def ids(found: list[Record | CorruptRecord]) -> list[str]:
    return [job.id for job in found]


def test_ids_sort_by_time_and_are_never_repeated(store: Store) -> None:
    made = [store.new_id() for _ in range(5000)]
    assert made == sorted(set(made))
    assert {len(job_id) for job_id in made} == {11}
    assert set("".join(made)) <= set("0123456789abcdefghjkmnpqrstvwxyz")


def test_ids_of_later_processes_sort_later(store: Store) -> None:
    code = "from schedulers.store.store import Store; print(Store('x').new_id())"
    first, second = (subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) for _ in range(2))
    assert first < second


ROOT = Path(__file__).parents[3]


def test_a_new_record_is_whole_on_the_disk(store: Store) -> None:
    spec = JobSpec(argv=("a b", "\udcff", ""), name="näme", nodes=2, procs_per_node=4, after=("x",))
    made = create(store, spec)
    read = Store(store.home).record(made.id)
    assert read == made
    assert (read.name, read.target, read.kind, read.nodes, read.procs) == ("näme", "lab", "local", 2, 4)
    assert (read.status.state, read.native_id, read.after) == (State.SUBMITTING, None, ("x",))
    assert read.submitter == (os.uname().nodename, os.getpid())
    assert (read.spec(), read.plan().job_id, read.options()) == (spec, made.id, {"slots": 2})
    assert (read.directory / "logs").is_dir()
    assert [event.name for event in read.events()] == ["submitting"]
    for file in ("spec.json", "plan.json", "target.json", "events.jsonl"):
        assert json.loads((read.directory / file).read_text())["schema"] == 1


def test_what_is_written_is_on_the_disk_before_it_has_its_name(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash of the machine must not leave a record, or a result, whose name is there and whose text is not."""
    flushed: dict[int, int] = {}  # inode -> its size when it was last flushed
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noting(fd: int) -> None:
        fsync(fd)
        flushed[os.fstat(fd).st_ino] = os.fstat(fd).st_size

    def check(source: str) -> None:
        files = (
            [Path(source)] if os.path.isfile(source) else [path for path in Path(source).iterdir() if path.is_file()]
        )
        assert files
        assert {path.name: flushed.get(path.stat().st_ino) for path in files} == {
            path.name: path.stat().st_size for path in files
        }

    def checked(move: Callable[[str, str], None], source: str, to: str) -> None:
        check(source)
        move(source, to)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "rename", partial(checked, rename))
    monkeypatch.setattr(os, "replace", partial(checked, replace))
    record = create(store)
    atomic_files.write_document(f"{record.path}/exit.json", {"state": "succeeded"})
    for path in (store.jobs, record.directory, record.directory / "exit.json"):
        assert path.stat().st_ino in flushed, path


def test_nobody_else_may_read_a_record(store: Store) -> None:
    directory = create(store).directory
    assert directory.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in directory.iterdir())


def test_an_id_is_used_once(store: Store) -> None:
    first = create(store, job_id="abc")
    with pytest.raises(StoreError, match="job abc exists already"):
        create(store, JobSpec(argv=("other",)), job_id="abc")
    assert first.spec().argv == ("train.py",)
    assert os.listdir(store.jobs) == ["abc"]


@pytest.mark.parametrize("job_id", ["", "..", "a/b", ".hidden", "A", "a\n"])
def test_what_is_no_id_is_refused(store: Store, job_id: str) -> None:
    with pytest.raises(StoreError, match="is not a job id"):
        store.create(job_id, JobSpec(argv=("a",)), Plan(target="", kind="", job_id=""), target="", kind="")


def test_options_that_no_file_can_hold_are_refused_before_anything_is_written(store: Store) -> None:
    with pytest.raises(SpecError, match=r"spec.json can hold only .* complex"):
        create(store, JobSpec(argv=("a",), options={"x": 3j}))
    assert store.records() == []


def test_the_life_of_a_job(store: Store) -> None:
    record = create(store)
    assert record.update(Status(state=State.QUEUED, observed_at=1.0), "native-7").state is State.QUEUED
    assert record.update(Status(state=State.RUNNING, observed_at=2.0)).state is State.RUNNING
    assert record.update(Status(state=State.QUEUED, attempt=1, observed_at=3.0)).attempt == 1
    assert record.update(Status(state=State.RUNNING, attempt=1, observed_at=4.0)).state is State.RUNNING
    last = record.update(Status(state=State.FAILED, reason=Reason.EXIT_CODE, exit_code=3, attempt=1, observed_at=5.0))
    assert record.update(Status(state=State.SUCCEEDED, observed_at=6.0)) == last
    read = store.record(record.id)
    assert (read.status, read.native_id) == (last, "native-7")
    assert read.started_at is not None
    assert read.ended_at is not None
    assert read.created_at <= read.started_at <= read.ended_at
    states = [event.data["status"]["state"] for event in read.events()]
    assert states == ["submitting", "queued", "running", "queued", "running", "failed"]


@given(st.lists(STATUSES, max_size=12))
def test_no_order_of_answers_changes_a_final_state_or_takes_an_attempt_back(
    tmp_path_factory: pytest.TempPathFactory, answers: list[Status]
) -> None:
    record = create(Store(tmp_path_factory.mktemp("home")))
    before = record.status
    for answer in answers:
        now = record.update(answer)
        assert before.state.may_become(now.state)
        assert now.attempt >= before.attempt
        if before.state.final:
            assert now == before
        before = now
    assert record.reload().status == before


def test_an_older_answer_does_not_take_a_job_back(store: Store) -> None:
    record = create(store)
    record.update(Status(state=State.RUNNING, observed_at=20.0))
    assert record.update(Status(state=State.QUEUED, observed_at=10.0), "n").state is State.RUNNING
    assert record.native_id == "n"
    assert record.update(Status(state=State.QUEUED, observed_at=30.0)).state is State.QUEUED  # requeued


def test_an_answer_without_news_writes_no_event_and_is_remembered(store: Store) -> None:
    record = create(store)
    record.update(Status(state=State.RUNNING, observed_at=2e9))
    size = (record.directory / "events.jsonl").stat().st_size
    for later in range(5):
        record.update(Status(state=State.RUNNING, observed_at=2e9 + later))
    assert (record.directory / "events.jsonl").stat().st_size == size
    assert store.record(record.id).status.observed_at == 2e9 + 4


def test_an_older_answer_without_news_does_not_take_the_moment_back(store: Store) -> None:
    record = create(store)
    record.update(Status(state=State.RUNNING, observed_at=10_000_000_000.0))
    record.update(Status(state=State.RUNNING, observed_at=10_000_000_020.0))
    record.update(Status(state=State.RUNNING, observed_at=10_000_000_010.0))
    assert store.record(record.id).status.observed_at == 10_000_000_020.0


def test_other_words_for_one_state_write_no_event_and_are_remembered(store: Store) -> None:
    record, at = create(store), time.time() + 1000
    record.update(Status(state=State.QUEUED, message="waits", observed_at=at))
    before = (record.directory / "events.jsonl").read_bytes()
    for number in range(20):
        queued = Status(state=State.QUEUED, message=f"is number {number} in the queue\udc80", observed_at=at + number)
        assert record.update(queued) == queued == store.record(record.id).status
    record.update(Status(state=State.QUEUED, message="an old answer", observed_at=at))
    later = record.update(Status(state=State.QUEUED, message="is number 19 in the queue\udc80", observed_at=at + 99))
    assert (later.message, later.observed_at) == ("is number 19 in the queue\udc80", at + 99)
    assert store.record(record.id).status == later
    assert (record.directory / "events.jsonl").read_bytes() == before
    # Of another state, attempt or time, these are nobody's words.
    for status in (
        Status(state=State.RUNNING, observed_at=at + 100),
        Status(state=State.QUEUED, attempt=1, message="anew", observed_at=at + 101),
        Status(state=State.FAILED, attempt=1, message="it failed", observed_at=at + 102),
    ):
        assert record.update(status) == status == store.record(record.id).status
    assert [event.name for event in record.events()] == ["submitting", *["status"] * 4]


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"state": "queued", "message": 5, "observed_at": 1e300}', "\udcff"]
)
def test_words_that_make_no_sense_are_nobodys(store: Store, text: str) -> None:
    record, at = create(store), time.time() + 1000
    record.update(Status(state=State.QUEUED, message="waits", observed_at=at))
    (record.directory / "seen").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert store.record(record.id).status == Status(state=State.QUEUED, message="waits", observed_at=at)


def test_only_what_cannot_be_asked_again_is_waited_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record, synced = create(store), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(fd))
    for status, native_id, waited in (
        (Status(state=State.QUEUED), "7", True),
        (Status(state=State.QUEUED, message="it waits for nodes"), None, False),
        (Status(state=State.RUNNING), None, False),
        (Status(state=State.SUCCEEDED, exit_code=0), None, True),
    ):
        synced.clear()
        record.update(status, native_id)
        assert bool(synced) is waited
    assert store.record(record.id).status.state is State.SUCCEEDED


def test_notes_stand_between_the_states(store: Store) -> None:
    record = create(store)
    record.append("cancel", by="me\udc80")
    assert record.status.state is State.SUBMITTING
    assert [(event.name, dict(event.data)) for event in record.events()][1:] == [("cancel", {"by": "me\udc80"})]
    with pytest.raises(ValueError, match="use update"):
        record.append("status")


def test_exit_is_replaced_in_one_step(store: Store) -> None:
    record = create(store)
    assert record.read_exit() is None
    atomic_files.write_document(f"{record.path}/exit.json", {"exit_code": 3, "message": "\udc80"})
    atomic_files.write_document(f"{record.path}/exit.json", {"exit_code": 4})
    assert record.read_exit() == {"exit_code": 4}
    assert [path.name for path in record.directory.glob(".*")] == []


def test_references(store: Store) -> None:
    for job_id in ("1abc0", "1abd0", "2xyz1"):
        create(store, job_id=job_id)
    assert store.record("@last").id == "2xyz1"
    assert store.record("1abc0").id == store.record("1ABC").id == "1abc0"
    assert store.record("2xyzl").id == "2xyz1"  # l read for 1
    assert store.record("LABCO").id == "1abc0"
    with pytest.raises(UnknownJob, match=r"'1ab' matches 2 jobs: 1abd0 \(job\), 1abc0 \(job\)"):
        store.record("1ab")
    with pytest.raises(UnknownJob, match="no job '2xyz2'; did you mean '2xyz1'"):
        store.record("2xyz2")
    for ref in ("", "../1abc0", "*", "@first", "\n"):
        with pytest.raises(UnknownJob):
            store.record(ref)


def test_an_exact_id_wins_over_longer_ones(store: Store) -> None:
    create(store, job_id="1a")
    create(store, job_id="1a2")
    assert store.record("1a").id == "1a"


def test_an_empty_store(store: Store) -> None:
    assert (store.records(), store.ids()) == ([], [])
    with pytest.raises(UnknownJob, match="has no jobs"):
        store.record("@last")


def test_jobs_are_listed_newest_first(store: Store) -> None:
    made = [create(store).id for _ in range(5)]
    assert ids(store.records()) == made[::-1]


def test_what_is_no_job_is_not_listed(store: Store) -> None:
    job = create(store)
    (store.jobs / ".new-half").mkdir()
    (store.jobs / "README").write_text("x")
    (store.jobs / "notes").write_text("x")
    assert ids(store.records()) == [job.id]


@given(SPECS)
def test_any_spec_is_stored(tmp_path_factory: pytest.TempPathFactory, spec: JobSpec) -> None:
    store = Store(tmp_path_factory.mktemp("home"))
    record = create(store, spec)
    assert store.record(record.id).spec() == spec
    assert store.record(record.id).name == spec.name


class TestPrune:
    def old(self, store: Store, days: float) -> Record:
        """A job that is over since so many days."""
        record = create(store)
        record.update(FINAL)
        path = record.directory / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["at"] -= days * 86400
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return record

    def test_by_age_and_number(self, store: Store) -> None:
        made = [self.old(store, days).id for days in (9, 8, 2, 1)]
        assert store.prune(older_than_s=5 * 86400, dry_run=True) == [made[1], made[0]]
        assert store.prune(keep=1, older_than_s=1.5 * 86400, dry_run=True) == made[2::-1]
        assert len(store.records()) == 4
        assert store.prune(keep=3) == [made[0]]
        assert store.prune(keep=0) == made[:0:-1]
        assert os.listdir(store.jobs) == []

    def test_a_live_job_is_never_deleted(self, store: Store) -> None:
        live = create(store)
        live.update(Status(state=State.RUNNING))
        over = self.old(store, 1)
        assert store.prune(keep=0) == [over.id]
        with pytest.raises(StoreError, match=f"job {live.id} is running, not over: cancel it first"):
            store.prune(ids=[live.id])
        assert ids(store.records()) == [live.id]

    def test_what_a_live_job_waits_for_is_kept(self, store: Store) -> None:
        needed = self.old(store, 1)
        waiting = create(store, JobSpec(argv=("a",), after=(needed.id,)))
        assert store.prune(keep=0) == []
        with pytest.raises(StoreError, match=f"job {needed.id} is still needed: {waiting.id} runs after it"):
            store.prune(ids=[needed.id])
        waiting.update(FINAL)
        assert set(store.prune(keep=0)) == {needed.id, waiting.id}

    def test_a_damaged_job_goes_only_when_it_is_named(self, store: Store) -> None:
        broken = self.old(store, 9)
        (broken.directory / "events.jsonl").write_text("rubbish\n")
        assert store.prune(keep=0) == []
        assert store.prune(ids=[broken.id[:10]]) == [broken.id]

    def test_nothing_said_deletes_nothing(self, store: Store) -> None:
        self.old(store, 9)
        with pytest.raises(StoreError, match="nothing selected to prune"):
            store.prune()
        with pytest.raises(UnknownJob):
            store.prune(ids=["zzz"])
        assert len(store.records()) == 1

    def test_what_crashes_left_behind_goes_too(self, store: Store) -> None:
        self.old(store, 9)
        for name, age in ((".new-a-1-2", 7200), (".old-b-2", 7200), (".new-c-1-2", 0)):
            (store.jobs / name).mkdir()
            os.utime(store.jobs / name, (time.time() - age, time.time() - age))
        store.prune(keep=0)
        assert os.listdir(store.jobs) == [".new-c-1-2"]


def test_documents_of_an_older_schema_are_brought_up_to_date(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """No accel has written schema 0; it is made up to try the mechanism."""
    record = create(store)
    lines = (
        (record.directory / "events.jsonl").read_text().replace('"schema":1', '"schema":0').replace('"name"', '"title"')
    )
    (record.directory / "events.jsonl").write_text(lines)
    with pytest.raises(StoreError, match="has schema 0, which no version of accel has written"):
        store.record(record.id)
    monkeypatch.setitem(
        atomic_files.MIGRATIONS,
        "events.jsonl",
        {0: lambda old: {("name" if key == "title" else key): old[key] for key in old} | {"schema": 1}},
    )
    assert store.record(record.id).name == "job"
    assert store.record(record.id).update(FINAL) == FINAL
    assert store.record(record.id).status == FINAL


@pytest.mark.parametrize("chosen", [True, False])
def test_a_home_that_cannot_be_created_names_the_setting(
    chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    home = tmp_path / "file/home"
    if chosen:
        monkeypatch.setenv("ACCEL_HOME", str(home))
    else:
        monkeypatch.delenv("ACCEL_HOME", raising=False)
    remedy = "choose another directory" if chosen else "set ACCEL_HOME to another directory"
    subject = f"ACCEL_HOME={home}" if chosen else f"the job store {home}"
    with pytest.raises(StoreError) as raised:
        create(Store(home))
    assert str(raised.value) == f"{subject} cannot be created: Not a directory; {remedy}"
