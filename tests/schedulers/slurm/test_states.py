"""What Slurm says, and what we say of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from schedulers.job import Reason, State
from schedulers.slurm.login import job_ops, slurm_commands, squeue_cache
from schedulers.slurm.states import _STATES, SlurmJobInfo, exit_code, status_of
from tests.needs import missing


def test_an_answer_is_as_old_as_its_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What squeue said has grown older while accounting was asked."""
    clock = [1000.0]
    queue = squeue_cache.CachedOutput(1000.0, 0.0, "", "")
    monkeypatch.setattr("time.time", lambda: clock[0])
    monkeypatch.setattr(job_ops, "_queue", lambda *_: queue)
    monkeypatch.setattr(job_ops, "_apply_accounting", lambda *_: clock.__setitem__(0, 1025.0))
    answer = job_ops.status(str(tmp_path), {"jobs": [{"job": "a", "slurm": "1"}]}, [])
    assert answer["age_s"] == 25.0


@pytest.mark.parametrize(
    ("said", "state", "reason", "code"),
    [
        (SlurmJobInfo(state="PENDING", reason="Priority"), State.QUEUED, Reason.NO_CAPACITY, None),
        (SlurmJobInfo(state="PENDING", reason="Dependency"), State.QUEUED, Reason.DEPENDENCY, None),
        (SlurmJobInfo(state="PENDING", reason="BeginTime"), State.QUEUED, Reason.NONE, None),
        (SlurmJobInfo(state="RUNNING"), State.RUNNING, Reason.NONE, None),
        (SlurmJobInfo(state="COMPLETED", code="0:0"), State.SUCCEEDED, Reason.NONE, 0),
        (SlurmJobInfo(state="FAILED", reason="NonZeroExitCode", code="7:0"), State.FAILED, Reason.EXIT_CODE, 7),
        (SlurmJobInfo(state="FAILED", code="0:11"), State.FAILED, Reason.EXIT_CODE, 139),
        (SlurmJobInfo(state="FAILED", reason="JobLaunchFailure", code="15:53"), State.FAILED, Reason.SETUP, None),
        (SlurmJobInfo(state="FAILED", code="0:53"), State.FAILED, Reason.SETUP, None),
        (SlurmJobInfo(state="CANCELLED by 1000"), State.CANCELLED, Reason.USER, None),
        (SlurmJobInfo(state="CANCELLED+"), State.CANCELLED, Reason.USER, None),
        (SlurmJobInfo(state="TIMEOUT", code="0:15"), State.FAILED, Reason.TIME_LIMIT, 143),
        (SlurmJobInfo(state="NODE_FAIL"), State.FAILED, Reason.NODE_FAILURE, None),
        (SlurmJobInfo(state="NODE_FAIL", code="0:0"), State.FAILED, Reason.NODE_FAILURE, None),
        (SlurmJobInfo(state="PENDING", reason="launch failed requeued held"), State.QUEUED, Reason.SETUP, None),
        (SlurmJobInfo(state="PENDING", reason="JobHoldMaxRequeue"), State.QUEUED, Reason.SETUP, None),
        (SlurmJobInfo(state="PREEMPTED", restarts=2), State.FAILED, Reason.PREEMPTED, None),
        (SlurmJobInfo(state="OUT_OF_MEMORY", code="0:125"), State.FAILED, Reason.OUT_OF_MEMORY, 137),
        (SlurmJobInfo(state="CANCELLED", reason="DependencyNeverSatisfied"), State.FAILED, Reason.DEPENDENCY, None),
    ],
)
def test_state_reason_and_code(said: SlurmJobInfo, state: State, reason: Reason, code: int | None) -> None:
    status = status_of(said)
    assert (status.state, status.reason, status.exit_code) == (state, reason, code)
    assert status.native_state == said.state
    assert status.attempt == said.restarts


def test_the_true_code_behind_the_echo_of_killed_peers() -> None:
    assert exit_code(SlurmJobInfo(state="FAILED", code="143:0", derived="7:0")) == 7
    assert exit_code(SlurmJobInfo(state="FAILED", code="3:0", derived="143:0")) == 3
    assert exit_code(SlurmJobInfo(state="FAILED", code="0:0", derived="9:0")) == 9
    assert exit_code(SlurmJobInfo(state="FAILED")) is None


@pytest.mark.parametrize(
    ("code", "derived", "said"),
    [("15:0", "7:0", 7), ("15:0", "15:0", 143), ("3:0", "15:0", 3), ("0:15", "0:0", 143), ("11:0", "0:0", 11)],
)
def test_the_true_code_where_only_accounting_has_it(
    code: str, derived: str, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sacct takes 128 from codes of 128 and more."""
    row = {**dict.fromkeys(slurm_commands.ACCOUNT, ""), "id": "7", "state": "FAILED", "code": code, "derived": derived}
    (tmp_path / "sacct").write_text(f"#!/bin/sh\necho '{slurm_commands.SEPARATOR.join(row.values())}'\n")
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (found,) = slurm_commands.accounts(["-j", "7"], {})
    assert exit_code(SlurmJobInfo(state=found["state"], code=found["code"], derived=found["derived"])) == said


@pytest.mark.parametrize(
    ("rows", "number", "state"),
    [
        (["74_[48-499]|CANCELLED by 0"], "74_48", "CANCELLED by 0"),
        (["74_[48-499]|CANCELLED by 0"], "74_499", "CANCELLED by 0"),
        (["74_[48-499]|CANCELLED by 0"], "74_47", None),
        (["74_[4-9%2]|CANCELLED by 0"], "74_9", "CANCELLED by 0"),
        (["74_[1,7,20-30:5]|CANCELLED by 0"], "74_25", "CANCELLED by 0"),
        (["74_[1,7,20-30:5]|CANCELLED by 0"], "74_26", None),
        (["74_[1,7,20-30:5]|CANCELLED by 0"], "74_7", "CANCELLED by 0"),
        (["74|CANCELLED by 0"], "74_3", "CANCELLED by 0"),
        (["74_[1-3]|PENDING"], "74_3", None),
        (["74_3|COMPLETED", "74_[4-9]|CANCELLED by 0", "74|CANCELLED by 0"], "74_3", "COMPLETED"),
        (["75_[0-9]|CANCELLED by 0"], "74_3", None),
    ],
)
def test_array_elements_that_never_began_share_a_row_of_accounting(
    rows: list[str], number: str, state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "jobs/2mxaaaaaaaa/slurm"
    own.mkdir(parents=True)
    lines = []
    for text in rows:
        given = dict(zip(("id", "state"), text.split("|"), strict=True), comment="accel:2mxaaaaaaaa")
        lines.append(slurm_commands.SEPARATOR.join({**dict.fromkeys(slurm_commands.ACCOUNT, ""), **given}.values()))
    (tmp_path / "rows").write_text("\n".join(lines) + "\n")
    (tmp_path / "sacct").write_text(f"#!/bin/sh\ncat {tmp_path}/rows\n")
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    for name in ("sacct", "squeue"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (own / "submitted.json").write_text('{"slurm": "74_0", "first": "2mxaaaaaaaa", "at": 1.0}')
    answer = job_ops.status(str(tmp_path), {"jobs": [{"job": "2mxaaaaaaaa", "slurm": number}]}, [])
    said = answer["jobs"][0]["said"]
    assert (said and said["state"], said and said["restarts"]) == (state, state and 0)


@pytest.mark.parametrize(("ends", "state"), [(True, "COMPLETED"), (True, None), (False, "PENDING")])
def test_scancel_fails_for_a_job_that_ends_at_that_moment(
    ends: bool, state: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says: the queue tells."""
    (tmp_path / "jobs/2mxaaaaaaaa/slurm").mkdir(parents=True)

    def row(state: str) -> str:
        given = {**dict.fromkeys(slurm_commands.QUEUE, ""), "id": "7", "state": state, "comment": "accel:2mxaaaaaaaa"}
        return slurm_commands.SEPARATOR.join(given.values()) + slurm_commands.SEPARATOR + "\n"

    (tmp_path / "before").write_text(row("PENDING"))
    (tmp_path / "after").write_text(row(state) if state else "")
    (tmp_path / "squeue").write_text(f"#!/bin/sh\ncat {tmp_path}/before\n")
    (tmp_path / "scancel").write_text(f"#!/bin/sh\nmv {tmp_path}/after {tmp_path}/before\necho No >&2\nexit 1\n")
    for name in ("squeue", "scancel"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"job": "2mxaaaaaaaa", "slurm": "7"}
    if ends:
        assert job_ops.cancel(str(tmp_path), job, []) == "gone"
    else:
        with pytest.raises(slurm_commands.CommandFailed, match="scancel: No"):
            job_ops.cancel(str(tmp_path), job, [])


def test_a_request_that_pends_for_ever_says_why() -> None:
    status = status_of(SlurmJobInfo(state="PENDING", reason="PartitionConfig"))
    assert "can never run" in status.message
    assert "(PartitionConfig)" in status.message


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "launch failed requeued held"),
        ("PENDING", "launch_failed_requeued_held"),
        ("PENDING", "user env retrieval failed requeued held"),
        ("PENDING", "job requeued in held state"),
        ("PENDING", "JobHoldMaxRequeue"),
        ("PENDING", "JobHeldUser"),
        ("REQUEUE_HOLD", "None"),
        ("REQUEUE_HOLD", "a reason of later versions"),
    ],
)
def test_a_job_that_is_held_says_how_it_is_let_go(state: str, reason: str) -> None:
    message = status_of(SlurmJobInfo(state=state, reason=reason)).message
    assert "scontrol release frees it" in message
    assert reason == "None" or message.endswith(f"({reason})")


def test_a_reason_that_nobody_has_told_us_of_is_shown_as_it_is() -> None:
    sentence = "(Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions)"
    status = status_of(SlurmJobInfo(state="PENDING", reason=sentence))
    assert status.reason is Reason.NO_CAPACITY
    assert status.message == sentence.strip("()")


def test_a_state_that_nobody_has_told_us_of_ends_no_job() -> None:
    status = status_of(SlurmJobInfo(state="LEVITATING"))
    assert status.state is State.RUNNING
    assert "LEVITATING" in status.message


@pytest.mark.parametrize("state", [*_STATES, "CANCELLED by 1000", "LEVITATING"])
def test_secrets_stay_no_longer_than_the_job(state: str, tmp_path: Path) -> None:
    """Slurm says how it ended where the job itself cannot: after the loss of its first node, for example."""
    own = tmp_path / "jobs/2mxaaaaaaaa/slurm"
    own.mkdir(parents=True)
    (own / "secrets.json").touch()
    (own / "settings.json").write_text('{"max_restarts": 0}')
    answer = {"said": {"state": state}, "started": True, "attempt": 0, "searched": False}
    job_ops._recheck_result(str(tmp_path), {"job": "2mxaaaaaaaa", "slurm": "7"}, answer)
    assert (own / "secrets.json").exists() is not status_of(SlurmJobInfo(state=state)).state.final


@pytest.mark.parametrize(
    ("most", "attempt", "facts", "kept"),
    [
        (1, 0, {}, True),  # `scontrol requeue` starts it again
        (1, 1, {}, False),  # it would be a start too many
        (1, 0, {"started": False}, True),
        (0, 0, {"started": False}, False),
        (1, 0, {"searched": True}, False),  # only accounting remembers it
        (None, 0, {}, False),
        (1, 0, {"said": None}, True),
        (1, 0, {"started": False, "said": {"state": "CANCELLED"}}, False),  # before it began, with scancel
        (1, 0, {"said": {"state": "CANCELLED by 1000"}}, False),
    ],
)
def test_secrets_stay_while_slurm_can_start_the_job_again(
    most: int | None, attempt: int, facts: dict[str, object], kept: bool, tmp_path: Path
) -> None:
    own = tmp_path / "jobs/2mxaaaaaaaa/slurm"
    own.mkdir(parents=True)
    (own / "secrets.json").touch()
    (own / "settings.json").write_text("{" if most is None else json.dumps({"max_restarts": most}))
    answer = {"said": {"state": "FAILED"}, "started": True, "attempt": attempt, "searched": False, **facts}
    job_ops._recheck_result(str(tmp_path), {"job": "2mxaaaaaaaa", "slurm": "7"}, answer)
    assert (own / "secrets.json").exists() is kept


@pytest.mark.parametrize(
    ("silent", "accounting", "kept"),
    [("", False, False), ("", True, False), ("_queue", False, True), ("_apply_accounting", True, True)],
)
def test_secrets_stay_while_slurm_may_know_the_job(
    silent: str, accounting: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm forgets a job that was cancelled before it began, unless there is accounting."""
    own = tmp_path / "jobs/2mxaaaaaaaa/slurm"
    own.mkdir(parents=True)
    (own / "secrets.json").touch()
    (own / "settings.json").write_text('{"max_restarts": 1}')

    def unanswered(*_: object) -> None:
        raise slurm_commands.Unanswered("no answer")

    monkeypatch.setattr(job_ops, "_queue", lambda *_: squeue_cache.CachedOutput(1000.0, 0.0, "", ""))
    monkeypatch.setattr(job_ops, "_apply_accounting", lambda *_: None)
    if silent:
        monkeypatch.setattr(job_ops, silent, unanswered)
    job_ops.status(str(tmp_path), {"jobs": [{"job": "2mxaaaaaaaa", "slurm": "7"}], "accounting": accounting}, [])
    assert (own / "secrets.json").exists() is kept


def test_secrets_go_with_the_result(tmp_path: Path) -> None:
    """The batch program removes them after it has written the result, and may be killed in between."""
    own = tmp_path / "jobs/2mxaaaaaaaa/slurm"
    own.mkdir(parents=True)
    (own / "secrets.json").touch()
    (own.parent / "exit.json").write_text("{}")
    job_ops.status(str(tmp_path), {"jobs": [{"job": "2mxaaaaaaaa", "slurm": "7"}]}, [])
    assert not (own / "secrets.json").exists()


def test_a_time_limit_says_what_the_script_could_do() -> None:
    assert "checkpoint_on_preemption" in status_of(SlurmJobInfo(state="TIMEOUT")).message


def test_every_state_of_this_slurm_is_known() -> None:
    manual = subprocess.run(["man", "-P", "cat", "squeue"], capture_output=True, text=True, timeout=60, check=False)
    part = manual.stdout.partition("JOB STATE CODES\n")[2].partition("\nENVIRONMENT")[0]
    named = set(re.findall(r"^ +[A-Z]{1,3} +([A-Z_]{5,})", part, re.MULTILINE))
    if not named:
        missing("the manual page of squeue", "apt-get install slurm-client man-db")
    assert named <= set(_STATES)
