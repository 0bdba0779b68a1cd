"""Many processes with one store: nothing is lost, doubled or half."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from schedulers.job import State, Status
from schedulers.processes import boot_id, pid_namespace
from schedulers.store import atomic_files
from schedulers.store.store import Record, Store
from tests.waiting import until

from .test_store import ROOT, create, store

__all__ = ["store"]

PROCESSES = 20


def together(code: str, *args: str) -> list[str]:
    """What 20 processes print that run `code`, all of them let go at once."""
    children = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"import sys\nprint('ready', flush=True)\nsys.stdin.read()\n{code}",
                *args,
                str(number),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PROCESSES)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.close()
    printed = []
    for child in children:
        assert child.stdout is not None
        with child.stdout:
            printed.append(child.stdout.read())
        assert child.wait() == 0
    return printed


def test_appends_at_once(store: Store) -> None:
    record = create(store)
    together(
        """
from schedulers.store.store import Store
record = Store(sys.argv[1]).record(sys.argv[2])
for turn in range(10):
    record.append("note", who=sys.argv[3], turn=turn, text="x" * 5000)
""",
        str(store.home),
        record.id,
    )
    notes = [event.data for event in record.reload().events()[1:]]
    assert len(notes) == PROCESSES * 10
    for number in range(PROCESSES):
        assert [note["turn"] for note in notes if note["who"] == str(number)] == list(range(10))


def test_creates_at_once(store: Store) -> None:
    printed = together(
        """
from schedulers.store.store import Store
from schedulers.job import JobSpec
from schedulers.target import Plan
store = Store(sys.argv[1])
for _ in range(10):
    i = store.new_id()
    store.create(i, JobSpec(argv=("a",)), Plan(target="t", kind="local", job_id=i), target="t", kind="local")
    print(i)
""",
        str(store.home),
    )
    made = [word for text in printed for word in text.split()]
    assert len(set(made)) == PROCESSES * 10
    found = store.records()
    assert all(isinstance(job, Record) for job in found)
    assert {job.id for job in found} == set(made)


def test_one_of_many_creates_of_the_same_id_wins(store: Store) -> None:
    printed = together(
        """
from schedulers.errors import StoreError
from schedulers.store.store import Store
from schedulers.job import JobSpec
from schedulers.target import Plan
try:
    plan = Plan(target="t", kind="k", job_id="same")
    Store(sys.argv[1]).create("same", JobSpec(argv=(sys.argv[2],)), plan, target="t", kind="k")
    print("won", sys.argv[2])
except StoreError as error:
    assert "already" in str(error), error
""",
        str(store.home),
    )
    winners = [text.split()[1] for text in printed if text]
    assert len(winners) == 1
    assert store.record("same").spec().argv == (winners[0],)
    assert os.listdir(store.jobs) == ["same"]


def test_one_final_state_wins(store: Store) -> None:
    record = create(store)
    printed = together(
        """
from schedulers.store.store import Store
from schedulers.job import State, Status
from schedulers.processes import boot_id, pid_namespace
record = Store(sys.argv[1]).record(sys.argv[2])
record.update(Status(state=State.RUNNING))
print(record.update(Status(state=State.FAILED, exit_code=int(sys.argv[3]))).exit_code)
""",
        str(store.home),
        record.id,
    )
    final = record.reload().status
    assert {int(text) for text in printed} == {final.exit_code}
    states = [event.data["status"]["state"] for event in record.events()]
    assert states.count("failed") == 1
    assert states[-1] == "failed"


def test_a_job_is_listed_whole_while_it_is_made_and_deleted(store: Store) -> None:
    printed = together(
        """
from schedulers.store.store import CorruptRecord, Store
from schedulers.job import JobSpec, State, Status
from schedulers.target import Plan
store = Store(sys.argv[1])
for turn in range(10):
    i = store.new_id()
    r = store.create(i, JobSpec(argv=("a",)), Plan(target="t", kind="local", job_id=i), target="t", kind="local")
    r.update(Status(state=State.SUCCEEDED))
    print([job.reason for job in store.records() if isinstance(job, CorruptRecord)])
    store.prune(ids=[i])
""",
        str(store.home),
    )
    assert {line for text in printed for line in text.splitlines()} == {"[]"}
    assert os.listdir(store.jobs) == []


LOCKER = """
import os
from schedulers.store import atomic_files as disk
path, counter = sys.argv[1], sys.argv[2]
for _ in range(20):
    with disk.locked_by_file(path) as held:
        assert held
        with open(counter) as file:
            value = int(file.read())
        with open(counter, "w") as file:
            file.write(str(value + 1))
"""


@pytest.mark.parametrize("blocking", [True, False])
def test_the_lock_is_exclusive(tmp_path: Path, blocking: bool) -> None:
    """Who holds it is alone: not even a shared lock is given to another."""
    path = tmp_path / "lock"
    path.touch()
    with open(path, "r+b") as ours, open(path, "r+b") as theirs:
        with atomic_files.locked(ours.fileno(), str(path), blocking=blocking) as held:
            assert held
            with pytest.raises(BlockingIOError):
                fcntl.flock(theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_an_append_is_decided_under_the_lock(store: Store) -> None:
    record = create(store)
    events = f"{record.path}/events.jsonl"
    decided = []

    def decide(rows: list[dict[str, Any]]) -> None:
        with open(events, "rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        decided.append(len(rows))

    atomic_files.append_line(events, decide)
    assert decided == [1]


def test_the_lock_for_file_systems_without_locks(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    together(LOCKER, str(tmp_path / "lock"), str(counter))
    assert counter.read_text() == str(PROCESSES * 20)
    assert os.listdir(tmp_path) == ["counter"]


def test_a_lock_of_a_process_that_is_gone_is_free(tmp_path: Path) -> None:
    lock = str(tmp_path / "lock")
    code = (
        "import os, sys"
        "\nfrom schedulers.store import atomic_files as disk\nwith disk.locked_by_file(sys.argv[1]): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, lock], cwd=ROOT, check=True)
    assert os.path.exists(lock)
    with atomic_files.locked_by_file(lock) as held:
        assert held
        with atomic_files.locked_by_file(lock, blocking=False) as again:
            assert not again
    assert os.listdir(tmp_path) == []


def test_a_lock_of_another_host_is_believed_until_it_is_old(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("another-host 1 abcd")
    with atomic_files.locked_by_file(str(lock), blocking=False) as held:
        assert not held
    os.utime(lock, (0, 0))
    with atomic_files.locked_by_file(str(lock)) as held:
        assert held


def test_a_lock_s_age_is_by_the_file_server_s_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "lock"
    lock.write_text("another-host 1 abcd")
    monkeypatch.setattr(time, "time", lambda: os.stat(lock).st_mtime + 3600)  # this host's clock is wrong
    for _ in range(2):
        with atomic_files.locked_by_file(str(lock), blocking=False) as held:
            assert not held


def test_a_holder_renews_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "_RENEW_S", 0.01)
    lock = tmp_path / "lock"
    with atomic_files.locked_by_file(str(lock)):
        os.utime(lock, (0, 0))
        until(lambda: os.stat(lock).st_mtime > 0, "the lock is renewed")
    assert os.listdir(tmp_path) == []


def test_a_lock_is_judged_where_its_holder_s_id_has_a_meaning(tmp_path: Path) -> None:
    """This process holds none of them: its id stands for one that lives, and the largest for one that has ended."""
    node, boot, namespace = os.uname().nodename, boot_id() or "-", pid_namespace() or "-"
    ended = 2**22 + 1
    holders = {
        f"{node} {ended} abcd": False,  # of an older version: believed until it is old
        f"{node} {ended} abcd {boot} {namespace}": True,
        f"{node} {os.getpid()} abcd {boot} {namespace}": False,
    }
    if boot_id():
        holders[f"another-host {ended} abcd {boot} {namespace}"] = True  # the machine was given another name
        holders[f"{node} {ended} abcd {boot} 1"] = False
        holders[f"{node} {os.getpid()} abcd another-boot {namespace}"] = False  # a clone of this machine
    for holder, free in holders.items():
        lock = tmp_path / "lock"
        lock.write_text(holder)
        once = functools.partial(atomic_files.locked_by_file, str(lock), blocking=False)
        with once() as first, once() as second:  # the first only breaks it, where it may
            assert (first or second) is free, holder
        lock.unlink(missing_ok=True)


def test_a_file_system_without_locks_is_noticed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: the system call is made to answer as one does."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    record = create(store)
    monkeypatch.setattr(fcntl, "flock", flock)
    record.update(Status(state=State.RUNNING))
    with record.submission() as held:
        assert held
        with record.submission(blocking=False) as again:
            assert not again
    assert not list(record.directory.glob("*.held*"))


def test_the_submission_is_held_by_one_until_it_dies(store: Store) -> None:
    record = create(store)
    code = """
import sys
import time
from schedulers.store.store import Store
with Store(sys.argv[1]).record(sys.argv[2]).submission():
    print(flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.home), record.id],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with record.submission(blocking=False) as held:
            assert not held
        child.kill()
    with record.submission(blocking=False) as held:
        assert held
