"""What follows from how a start of a job ended: a table. And the small parts of the first node's program."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from schedulers.job import Status
from schedulers.node import logs
from schedulers.slurm.batch import shared_files, slurm
from schedulers.slurm.batch.outcome import Observations, decide_outcome, restart_limit_status
from schedulers.slurm.submit import program

RUNNING = {"JobState": "RUNNING", "Reason": "None", "Restarts": "0", "PreemptTime": "None", "TimeLimit": "01:00:00"}
GOING = {**RUNNING, "JobState": "COMPLETING"}
NAMES = ["n1", "n2"]


def report(code: int, **facts: Any) -> dict[str, Any]:
    plain = {
        "code": code,
        "failure": None,
        "refused": None,
        "words": "",
        "preempted": code == 85,
        "told": None,
        "at": 1.0,
    }
    return {**plain, **facts}


def failure(rank: int | None, code: int, message: str, reason: str = "exit_code", time: float = 5.0) -> dict[str, Any]:
    return {
        "rank": rank, "node": 0, "host": "n1", "exit_code": code, "reason": reason, "how": "ended", "message": message,
        "cause": "", "time": time,
    }  # fmt: skip


def evidence(*reports: dict[str, Any] | None, restarts: int = 0, attempt: int = 0, **facts: Any) -> Observations:
    known = Observations({"nodes": len(reports), "max_restarts": restarts}, attempt, NAMES[: len(reports)])
    known.reports = {rank: one for rank, one in enumerate(reports) if one is not None}
    known.started_ranks = set(range(len(reports)))
    known.slurm = dict(RUNNING)
    for name, value in facts.items():
        setattr(known, name, value)
    return known


SEVEN = report(7, failure=failure(3, 7, "ValueError: x"))
LATER = report(7, failure=failure(1, 1, "RuntimeError: y", time=6.0))
GONE = report(1, failure=failure(None, 1, "no heartbeat", "node_failure"))
SAVED = report(85, failure=failure(0, 85, "rank 0 exited with code 85", "preempted"))
TOLD = report(143, told="SIGTERM")
SILENT = {"reason": "node_failure", "message": "n2 has not reported for 22 s"}
LATE = {"reason": "rendezvous", "message": "n2 did not start within 60 s"}
ECHO = report(1, failure=failure(0, 1, "RuntimeError: Connection closed by peer"))
UNMET = report(1, refused="rendezvous", words="node 1 (n2) of 2 nodes did not join at n1:20001 within 60 s")
LIMIT = {**GOING, "Reason": "TimeLimit", "TimeLimit": "00:10:00"}
PREEMPTED = {**RUNNING, "PreemptTime": "2026-11-21T13:28:18"}
# As in Slurm 22.05.8: the reason is set together with the state, and the batch script's SIGTERM comes after it.
LOST = {**GOING, "Reason": "NodeDown"}
FELLED = report(143, failure=failure(None, 143, "", "node_failure"))


@pytest.mark.parametrize(
    ("known", "do", "state", "reason", "code", "said"),
    [
        (evidence(report(0), report(0)), "finish", "succeeded", "none", 0, ""),
        (evidence(report(0), report(0), srun=1), "finish", "succeeded", "none", 0, ""),
        (evidence(SEVEN, LATER), "finish", "failed", "exit_code", 7, "rank 3: ValueError: x"),
        (evidence(LATER, SEVEN, restarts=5), "finish", "failed", "exit_code", 7, "rank 3: ValueError: x"),
        (evidence(report(0), report(0), cancel=True), "finish", "cancelled", "user", 143, "cancelled"),
        (evidence(SEVEN, None, cancel=True), "finish", "cancelled", "user", 7, "cancelled"),
        (evidence(SAVED, SAVED, restarts=1), "again", "failed", "preempted", 85, "left a checkpoint"),
        (evidence(SAVED, SAVED), "finish", "failed", "preempted", 85, "not started again without --max-restarts"),
        (evidence(SAVED, SAVED, restarts=2, attempt=2), "finish", "failed", "preempted", 85,
         "it was started 3 times, and --max-restarts 2 allows no more"),
        (evidence(SAVED, SAVED, restarts=1, terminated=True, slurm=GOING), "finish", "cancelled", "user", 85,
         "scancel"),
        (evidence(TOLD, TOLD, terminated=True, slurm=GOING), "finish", "cancelled", "user", 143, "scancel"),
        (evidence(TOLD, TOLD, terminated=True, slurm=LIMIT), "finish", "failed", "time_limit", 143,
         "its time limit (00:10:00) was reached; no checkpoint was left: call accelerator.checkpoint_on_preemption()"),
        (evidence(SAVED, SAVED, terminated=True, slurm=LIMIT, restarts=1), "again", "failed", "time_limit", 85,
         "00:10:00"),
        (evidence(TOLD, FELLED, terminated=True, slurm=LOST), "finish", "failed", "node_failure", 143,
         "Slurm lost a node of the job (NodeDown); it is not started again without --max-restarts"),
        (evidence(TOLD, None, terminated=True, slurm=LOST), "finish", "failed", "node_failure", 143,
         "no report from n2"),
        (evidence(TOLD, None, terminated=True, slurm={**RUNNING, "JobState": "NODE_FAIL"}), "finish", "failed",
         "node_failure", 143, "Slurm lost a node"),
        (evidence(SAVED, None, terminated=True, slurm=LOST, restarts=1), "again", "failed", "node_failure", 85,
         "no report from n2"),
        (evidence(TOLD, TOLD, terminated=True, slurm={**GOING, "Reason": "DeadLine"}), "leave", "failed",
         "exit_code", 143,
         "ended in Slurm (DeadLine)"),
        (evidence(TOLD, TOLD, slurm=PREEMPTED, restarts=1), "again", "failed", "preempted", 143, "higher priority"),
        (evidence(TOLD, TOLD, slurm=PREEMPTED), "finish", "failed", "preempted", 143, "--max-restarts"),
        (evidence(TOLD, TOLD, terminated=True, slurm={**GOING, "Restarts": "1"}), "leave", "failed", "node_failure",
         143,
         "Slurm starts it again"),
        (evidence(SAVED, TOLD, terminated=True, slurm={**GOING, "Restarts": "1"}), "leave", "failed", "preempted", 85,
         "left a checkpoint"),
        (evidence(TOLD, TOLD, terminated=True, slurm={**GOING, "Restarts": "1"}, runs_before=1), "finish", "cancelled",
         "user", 143, "scancel"),
        (evidence(None, None, slurm={**RUNNING, "JobState": "PENDING", "Restarts": "1"}, restarts=1), "leave", "failed",
         "node_failure", 143, "Slurm starts it again"),
        (evidence(TOLD, TOLD, terminated=True, slurm=None), "leave", "failed", "exit_code", 143, "be queried"),
        (evidence(TOLD, TOLD, slurm=RUNNING), "finish", "failed", "exit_code", 143, "SIGTERM from outside accel"),
        (evidence(SAVED, TOLD, slurm=RUNNING, restarts=1), "again", "failed", "preempted", 85, "checkpoint"),
        (evidence(GONE, None, restarts=1), "again", "failed", "node_failure", 1, "no heartbeat"),
        (evidence(GONE, None), "finish", "failed", "node_failure", 1, "--max-restarts"),
        (evidence(ECHO, None, overdue=SILENT, restarts=1), "again", "failed", "node_failure", 1, "n2 has not reported"),
        (evidence(SEVEN, None, overdue=SILENT, restarts=1), "finish", "failed", "exit_code", 7, "ValueError"),
        (evidence(None, None, overdue=LATE, started_ranks={0}), "finish", "failed", "rendezvous", 1,
         "n2 did not start"),
        (evidence(UNMET, None, started_ranks={0}), "finish", "failed", "rendezvous", 1,
         "n1: node 1 (n2) of 2 nodes did not"),
        (evidence(UNMET, report(4, refused="setup", words="the setup command 'x' failed", at=2.0)), "finish", "failed",
         "setup", 4, "n2: the setup command"),
        (evidence(None, None, started_ranks=set(), srun=1, last_message="No module named submitit"), "finish",
         "failed", "setup", 1, "n1, n2 could not start: No module named submitit"),
        (evidence(report(0), report(137, words="step 7")), "finish", "failed", "exit_code", 137,
         "n2: accel launch was killed by SIGKILL"),
        (evidence(report(137, refused="setup", words="the setup command 'x' failed")), "finish", "failed", "setup", 137,
         "n1: the setup command 'x' failed"),
        (evidence(report(0), None, srun=137, last_message="n2: task 1: Killed"), "finish", "failed", "node_failure",
         137, "n2 ended without a report: n2: task 1: Killed"),
    ],
)  # fmt: skip
def test_conclusions(known: Observations, do: str, state: str, reason: str, code: int, said: str) -> None:
    end = decide_outcome(known)
    status = end.status
    assert (end.do, status["state"], status["reason"], status["exit_code"]) == (do, state, reason, code), status
    assert said in status["message"]
    assert "\n" not in status["message"]
    Status.from_json(status)


def test_a_start_too_many_says_how_the_last_one_ended() -> None:
    last = {"reason": "preempted", "message": "its ranks were warned", "exit_code": 85}
    assert restart_limit_status({"nodes": 1, "max_restarts": 1}, 2, last)["message"] == (
        "its ranks were warned; it was started 2 times, and --max-restarts 1 allows no more"
    )
    assert restart_limit_status({"nodes": 1, "max_restarts": 1}, 2, None)["reason"] == "node_failure"


def test_a_held_port_is_for_its_job_alone() -> None:
    first, held = slurm.hold_port(4711)
    second, other = slurm.hold_port(4711)
    with held, other:
        assert 20000 <= first < second
        server = socket.create_server(
            ("", first), family=socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET, backlog=1
        )
        server.close()


def test_the_ports_begin_where_a_hand_made_script_has_its_own() -> None:
    from schedulers.slurm import topology

    assert (slurm.FIRST_PORT, slurm.PORTS) == (topology.FIRST_PORT, topology.PORTS)


def test_an_interface_and_one_that_is_not_there() -> None:
    assert slurm.address_of(None) is None
    assert slurm.address_of("lo") == "127.0.0.1"
    with pytest.raises(slurm.Problem, match=r"interface ib7: .* .interfaces: .*lo"):
        slurm.address_of("ib7")


def test_a_torn_line_is_no_document(tmp_path: Path) -> None:
    path = str(tmp_path / "lines")
    shared_files.append(path, {"a": 1})
    with open(path, "ab") as file:
        file.write(b'{"a": 2')
    shared_files.append(path, {"a": 3})
    assert [line["a"] for line in logs.json_lines(path)] == [1, 3]


def test_a_full_disk_gives_up_what_was_kept_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spare, path = str(tmp_path / "spare"), str(tmp_path / "exit.json")
    shared_files.preallocate(spare)
    create = shared_files._create

    def full(name: str, text: str) -> None:
        if os.path.exists(spare):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        create(name, text)

    monkeypatch.setattr(shared_files, "_create", full)
    assert shared_files.write_once(path, {"state": "failed"}, spare) is None
    assert json.loads(Path(path).read_text())["state"] == "failed"
    assert shared_files.write_once(path, {"state": "succeeded"}, spare) is None
    assert json.loads(Path(path).read_text())["state"] == "failed"
    assert os.listdir(tmp_path) == ["exit.json"]


def test_what_is_sent_runs_by_itself(tmp_path: Path) -> None:
    """Without accel, from a file whose name does not say what it is; and a user's mistake is one line."""
    (tmp_path / "batch.py").write_bytes(program())
    (tmp_path / "slurm").mkdir()
    argv = [sys.executable, "-I", "-S", str(tmp_path / "batch.py"), str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, env={"SLURM_JOB_ID": "1"})
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"accel: {tmp_path}/slurm/settings.json cannot be read, or is from another accel version\n"


KILLED = "kill -KILL $$"
DYING = "echo 'slurm_requeue error: Transport endpoint is not connected' >&2; exit 1"  # a controller, just then
TAKEN = 'echo "JobId=7 JobName=x UserId=me(1) GroupId=me(1) JobState={} Reason=None Requeue=1 Restarts={}"'
REFUSAL = "echo 'Requested operation is presently disabled for job 7' >&2; exit 1"


@pytest.mark.parametrize(
    ("requeue", "show", "told", "refused", "asked"),
    [
        ([KILLED], TAKEN.format("COMPLETING", 3), True, None, 1),  # done, and its client ended before it was told so
        (["exit 1"], TAKEN.format("PENDING", 2), True, None, 1),
        ([KILLED], "exit 1", True, None, 1),  # nobody can say: Slurm's own word for the job will tell
        ([KILLED], TAKEN.format("COMPLETING", 2), True, None, 1),  # Slurm ends it: the same
        ([KILLED, "exit 0"], TAKEN.format("RUNNING", 2), True, None, 2),  # a signal for all, before it had asked
        ([KILLED, "exit 0"], "exit 1", False, None, 2),
        ([REFUSAL], TAKEN.format("PENDING", 2), False, None, 1),  # somebody else has asked for it
        ([REFUSAL, "exit 0"], "exit 1", False, None, 2),  # what refuses cannot be asked now
        ([DYING, "exit 0"], "exit 1", False, None, 2),
        ([REFUSAL], TAKEN.format("RUNNING", 2), False, "Requested operation is presently disabled for job 7", 1),
        ([REFUSAL], TAKEN.format("RUNNING", 2), True, "Requested operation is presently disabled for job 7", 1),
    ],
)
def test_a_requeue_whose_answer_is_lost_is_no_refusal(
    requeue: list[str], show: str, told: bool, refused: str | None, asked: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Slurm ends all processes of the job because it requeues it, its client too: before that has been told so."""
    for number, script in enumerate(requeue):
        (tmp_path / str(number)).write_text(script)
    program = (
        f'#!/bin/sh\nif [ "$1" = show ]; then {show}; exit; fi\n'
        f"echo . >> {tmp_path}/calls\n. {tmp_path}/$(($(wc -l < {tmp_path}/calls) - 1))\n"
    )
    (tmp_path / "scontrol").write_text(program)
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_PAUSES_S", (0, 0, 0))
    assert slurm.requeue("7", 2, lambda: told) == refused
    assert (tmp_path / "calls").read_text() == asked * ".\n"


def test_a_signal_for_all_processes_spares_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nkill -TERM $$\nexit 0\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = slurm._call("scontrol", "requeue", "7")
    assert done is not None
    assert done.returncode == 0
