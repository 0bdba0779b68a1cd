"""What hosts' files mean for a job, asked of real hosts on which the files were put by hand."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedulers import Cursor, LogLine, Reason, State, Unreachable
from schedulers.hosts.jobs.native_id import Native
from schedulers.hosts.jobs.status import query_all
from schedulers.ssh.target import SshOptions, SshTarget
from schedulers.target import TargetContext
from tests.clusters.ssh import SshHosts

from .conftest import host_options, job_files

JOB = "2mxaaaaaaaa"
ALL = f"node1,node2,node3/{JOB}"


@pytest.fixture
def target(ssh_hosts: SshHosts, tmp_path: Path) -> Iterator[SshTarget]:
    options = SshOptions(hosts="node[1-3]", **host_options(ssh_hosts))
    made = SshTarget(TargetContext(name="lab", options=options, jobs=tmp_path))
    yield made
    made.close()


@pytest.fixture
def supervised() -> Iterator[Any]:
    """Makes a job on a host look as if its supervisor lived: its lock is held."""
    held: list[int] = []

    def supervise(directory: Path) -> None:
        lock = os.open(directory / "supervisor.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        held.append(lock)

    yield supervise
    for lock in held:
        os.close(lock)


def put(hosts: SshHosts, node: str, **documents: Any) -> Path:
    directory = job_files(hosts, node, JOB)
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        (directory / f"{name}.json").write_text(json.dumps(document))
    return directory


RUNNING = {"schema": 1, "phase": "running", "attempt": 1, "message": ""}
ENDED = {"schema": 1, "state": "failed", "reason": "exit_code", "exit_code": 3, "message": "rank 0: no", "attempt": 1}


def test_a_result_beats_what_a_host_says_it_is_doing(target: SshTarget, ssh_hosts: SshHosts, supervised: Any) -> None:
    supervised(put(ssh_hosts, "node1", state=RUNNING))
    status = target.poll([ALL])[ALL]
    assert (status.state, status.attempt, status.native_state) == (State.RUNNING, 1, "running")
    put(ssh_hosts, "node1", exit=ENDED)
    status = target.poll([ALL])[ALL]
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 3)
    assert status.message == "rank 0: no"


@pytest.mark.parametrize(
    ("phase", "state"), [("waiting", State.QUEUED), ("setup", State.QUEUED), ("ending", State.RUNNING)]
)
def test_phases(target: SshTarget, ssh_hosts: SshHosts, supervised: Any, phase: str, state: State) -> None:
    supervised(put(ssh_hosts, "node2", state={**RUNNING, "phase": phase, "message": "waits for node3"}))
    status = target.poll([ALL])[ALL]
    assert (status.state, status.message) == (state, "waits for node3")


def test_supervisors_that_were_killed_leave_a_lost_job(target: SshTarget, ssh_hosts: SshHosts) -> None:
    for node in ("node1", "node2", "node3"):
        put(ssh_hosts, node, state=RUNNING)
    status = target.poll([ALL])[ALL]
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)


def test_a_result_that_is_damaged_is_a_result(target: SshTarget, ssh_hosts: SshHosts) -> None:
    (put(ssh_hosts, "node1") / "exit.json").write_text('{"state": "fai')
    status = target.poll([ALL])[ALL]
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)
    assert "its result on node1 cannot be read" in status.message


def test_a_host_that_cannot_be_asked_is_no_answer(target: SshTarget, ssh_hosts: SshHosts, supervised: Any) -> None:
    assert target.poll([ALL]) == {}
    ssh_hosts["node1"].kill()
    other = f"node2/{JOB}"
    supervised(put(ssh_hosts, "node2", state=RUNNING))
    assert target.poll([ALL])[ALL].state is State.RUNNING
    alone = f"node1/{JOB}"
    with pytest.raises(Unreachable, match="node1") as caught:
        target.poll([alone, other])
    assert caught.value.answers[other].state is State.RUNNING
    assert list(caught.value.silent or {}) == [alone]


def test_a_host_that_is_cut_off_holds_up_no_answer(
    target: SshTarget, ssh_hosts: SshHosts, supervised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised(put(ssh_hosts, "node2", state=RUNNING))
    assert target.poll([ALL])[ALL].state is State.RUNNING  # and there is a connection to each
    ssh_hosts["node1"].link(False)
    answered = threading.Event()
    hold = target._hosts.note

    def note(host: Any, error: Any) -> None:
        if host.name == "node1":
            answered.wait(60)
        hold(host, error)

    monkeypatch.setattr(target._hosts, "note", note)  # however soon its silence is noticed, it is not waited for
    assert target.poll([ALL])[ALL].state is State.RUNNING
    answered.set()


FENCED = {**ENDED, "reason": "node_failure", "exit_code": None, "message": "cut off", "fenced": True}
OF_TWO = {**RUNNING, "members": [0, 1]}


def test_a_host_that_was_cut_off_does_not_speak_for_the_job(target: SshTarget, ssh_hosts: SshHosts) -> None:
    put(ssh_hosts, "node1", state=OF_TWO, exit=FENCED)
    assert target.poll([ALL])[ALL].reason is Reason.NODE_FAILURE  # nobody else knows of it
    put(ssh_hosts, "node3", exit={**ENDED, "state": "succeeded", "reason": "none", "exit_code": 0})
    assert target.poll([ALL])[ALL].state is State.SUCCEEDED


def test_a_host_that_was_cut_off_is_believed_when_too_few_are_left(target: SshTarget, ssh_hosts: SshHosts) -> None:
    put(ssh_hosts, "node1", state=OF_TWO, exit=FENCED)
    ssh_hosts["node2"].kill()
    assert target.poll([ALL])[ALL].reason is Reason.NODE_FAILURE
    ssh_hosts["node3"].kill()  # the two that cannot be asked may have gone on
    with pytest.raises(Unreachable, match=r"node[23]: "):
        target.poll([ALL])


def test_a_host_of_two_jobs_is_one_host() -> None:
    assert Native.parse("me@a:22,b/one").hosts == Native.parse("me@a:22,b/two").hosts


def test_lines_of_all_hosts_from_a_cursor(target: SshTarget, ssh_hosts: SshHosts, supervised: Any) -> None:
    first, second = put(ssh_hosts, "node1", state=RUNNING), put(ssh_hosts, "node2", state=RUNNING)
    for directory in (first, second):
        supervised(directory)
        (directory / "logs/setup.log").write_text("set up\n")
    (first / "logs/rank-0.a0.log").write_bytes(b"one\ntw\xff\r\nstep 1\rpart")
    (second / "logs/rank-1.a0.log").write_bytes(b"other\n")
    (second / "logs/rank-0.a1.log").write_bytes(b"again\n")
    (first / "logs/odd,name.log").write_bytes(b"not ours\n")
    cursor = Cursor()
    lines = take(target, cursor)
    assert [(line.rank, line.attempt, line.text) for line in lines] == [
        (None, 0, "set up\n"),
        (None, 0, "set up\n"),
        (0, 0, "one\n"),
        (0, 0, "tw\udcff\r\n"),
        (0, 0, "step 1\r"),
        (1, 0, "other\n"),
        (0, 1, "again\n"),
    ]
    assert take(target, cursor) == []
    with (first / "logs/rank-0.a0.log").open("ab") as file:
        file.write(b"ly\nlast")
    cursor = Cursor.parse(str(cursor))
    assert [line.text for line in take(target, cursor)] == ["partly\n"]
    put(ssh_hosts, "node1", exit=ENDED)
    assert [line.text for line in take(target, cursor)] == ["last"]


def test_a_host_that_came_back_is_asked_before_its_lines_are_given_up(
    target: SshTarget, ssh_hosts: SshHosts, supervised: Any
) -> None:
    for number, node in enumerate(("node1", "node2")):
        directory = put(ssh_hosts, node, state=RUNNING)
        supervised(directory)
        (directory / f"logs/rank-{number}.a0.log").write_text(f"of {node}\n")
    ssh_hosts.end_sshd("node2")
    cursor, job = Cursor(), f"node1,node2/{JOB}"
    with pytest.raises(Unreachable, match="its logs cannot be read: node2: "):
        take(target, cursor, job)
    ssh_hosts.start_sshd("node2")
    for node in ("node1", "node2"):
        put(ssh_hosts, node, exit=ENDED)
    assert [line.text for line in take(target, Cursor(), job)] == ["of node1\n", "of node2\n"]


def test_lines_longer_than_what_is_read_at_once(target: SshTarget, ssh_hosts: SshHosts) -> None:
    directory = put(ssh_hosts, "node1", exit=ENDED)
    long = b"x" * 5_000_000 + b"\n"
    (directory / "logs/rank-0.a0.log").write_bytes(b"before\n" + long + b"after\n" * 400_000)
    lines = take(target, Cursor(), f"node1/{JOB}")
    assert b"".join(line.text.encode() for line in lines) == b"before\n" + long + b"after\n" * 400_000


def test_lines_since_a_time(target: SshTarget, ssh_hosts: SshHosts) -> None:
    directory = put(ssh_hosts, "node2", exit=ENDED)
    (directory / "logs/rank-1.a0.log").write_bytes(b"early\nlate\n")
    noted = [{"schema": 1, "time": at, "sizes": {"rank-1.a0": size}} for at, size in ((100, 8), (200, 11))]
    (directory / "logs/sizes.jsonl").write_text("".join(json.dumps(note) + "\n" for note in noted))
    assert [line.text for line in take(target, target.cursor_at(ALL, 150))] == ["late\n"]
    assert [line.text for line in take(target, target.cursor_at(ALL, 50))] == ["early\n", "late\n"]
    # A host that cannot be asked where its lines stood holds up nobody's, and is asked again when they are read.
    other = put(ssh_hosts, "node1", exit=ENDED)
    (other / "logs/rank-0.a0.log").write_bytes(b"other\n")
    target.close()
    ssh_hosts.end_sshd("node2")
    since = str(target.cursor_at(ALL, 150))
    line, said = [line.text for line in take(target, Cursor.parse(since))]
    assert line == "other\n"
    assert said.startswith("accel: its logs cannot be read: node2: ")
    ssh_hosts.start_sshd("node2")
    assert [line.text for line in take(target, Cursor.parse(since))] == ["other\n", "late\n"]


def test_a_claim_of_an_earlier_submit_is_no_other_host(target: SshTarget, ssh_hosts: SshHosts) -> None:
    """Its client was killed, and the hosts had other numbers then; of one submit, two claims are one directory."""
    (host,) = Native.parse(f"node1/{JOB}").hosts

    def told(op: str, node: int, token: str) -> object:
        ((_, answer, error),) = query_all(target._hosts, [host], {"op": op, "job": JOB, "node": node, "token": token})
        assert error is None
        return answer

    told("claim", 2, "aa")
    told("claim", 1, "bb")
    assert told("clear", 1, "bb") == []
    assert not (ssh_hosts.home("node1") / f".accel/jobs/{JOB}.claims").exists()
    told("claim", 2, "bb")
    told("claim", 1, "bb")
    assert told("clear", 1, "bb") == [2]


def take(target: SshTarget, cursor: Cursor, job: str = ALL) -> list[LogLine]:
    lines = list(target.logs(job, cursor))
    for line in lines:
        cursor.advance(line)
    return lines
