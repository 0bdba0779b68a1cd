"""The launcher's report, read from the end of a container's log: held to what the launcher writes."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from accel import known_causes
from accel.launch.failure import Exit, Failure, diagnose
from schedulers import Reason, State, Status
from schedulers.kubernetes.status import pod_states
from schedulers.kubernetes.status.job_states import status_of
from tests.schedulers.kubernetes.shapes import condition, pod, terminated, workload

_TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    load()\nValueError: no data'


def failure(code: int = 1, type_: str = "ValueError", message: str = "no data", oom_kills: int = 0) -> Failure:
    error = {"type": type_, "message": message, "traceback": _TRACE if type_ == "ValueError" else ""}
    one = Exit(rank=3, local_rank=1, pid=7, code=code, time=0.0, error=error if type_ else None, log="/tmp/x.log")
    return diagnose(one, node=1, host="run1-1", attempt=2, oom_kills=oom_kills, others="rank 0 ended by SIGTERM")


def read(one: Failure) -> pod_states.Report:
    found = pod_states.read_report(f"[rank 3] epoch 1\n{one.text()}\n")
    assert found is not None
    written, _ = pod_states.report_and_detail(*ended_pod(1, message(**one.summary())))
    assert written == found, "the report in the termination message is that of the log"
    return found


def message(pod: str = "uid-0", **outcome: Any) -> str:
    """A launcher's termination message."""
    return json.dumps({"schema": 1, "pod": pod, **outcome})


def ended_pod(code: int, text: str, report: str | None = "launcher") -> tuple[Any, Any, Any]:
    """A pod, its container and how that ended. `report`: its annotation; None in pods of older versions."""
    container = terminated(code, message=text)
    ended = pod(0, container, phase="Failed" if code else "Succeeded", uid="uid-0")
    if report is not None:
        ended["metadata"]["annotations"] = {"accel.dev/report": report}
    return ended, container, container["state"]["terminated"]


def status_after(code: int, text: str, report: str | None = "launcher") -> Status:
    ended, _, _ = ended_pod(code, text, report)
    type_ = "Failed" if code else "Complete"
    return status_of(workload("Job", condition(type_, "BackoffLimitExceeded" if code else "")), [ended])


def test_who_failed_first_and_how() -> None:
    found = read(failure())
    assert (found.failed_rank, found.reason, found.message) == (
        "rank 3 on node 1", Reason.EXIT_CODE, "ValueError: no data",
    )  # fmt: skip
    assert read(failure(type_="")).message == "exited with code 1"
    assert read(failure(code=-signal.SIGSEGV, type_="")).message.startswith("was killed by SIGSEGV (exit code 139)")


@pytest.mark.parametrize(("reason", "said"), [
    ("out_of_memory", "CUDA out of memory. Tried"), ("out_of_memory", "DefaultCPUAllocator: can't allocate memory"),
    ("rendezvous", "EADDRINUSE"), ("rendezvous", "Timed out after 30 seconds"),
    ("exit_code", "No space left on device"),
    ("setup", "CUDA error: no kernel image is available"), ("setup", "ModuleNotFoundError: No module named 'x'"),
])  # fmt: skip
def test_the_reason_is_the_launchers(reason: str, said: str) -> None:
    type_, _, message = said.rpartition(": ")
    one = failure(type_=type_ or "RuntimeError", message=message)
    assert one.reason == reason
    assert read(one).reason is Reason(reason)


def test_no_cause_that_the_launcher_knows_is_missed() -> None:
    for _, reason, cause, _ in known_causes._CAUSES:
        one = Failure(
            rank=0, node=0, host="h", attempt=0, exit_code=1, reason=reason, how="exited with code 1", message="",
            cause=cause,
        )  # fmt: skip
        assert read(one).reason is Reason(reason), cause
    for code in (126, 127):
        assert read(failure(code=code, type_="")).reason is Reason.SETUP
    assert read(failure(code=-9, type_="", oom_kills=1)).reason is Reason.OUT_OF_MEMORY


def test_a_preemption_and_a_node_that_went_silent() -> None:
    assert read(failure(code=85)).reason is Reason.PREEMPTED
    lost = Failure(
        rank=None, node=1, host="h", attempt=0, exit_code=1, reason="node_failure", how="went silent", message=""
    )
    found = read(lost)
    assert (found.failed_rank, found.reason, found.message) == (
        "the launcher on node 1",
        Reason.NODE_FAILURE,
        "went silent",
    )


def test_a_text_without_one() -> None:
    assert pod_states.read_report("Traceback\naccel launch: 2 nodes, node 0 at a:29500") is None


def test_a_report_whose_beginning_is_cut_off() -> None:
    text = failure().text()
    assert pod_states.last_line(text[text.index("line 3") :]) == "ValueError: no data"
    assert pod_states.last_line("  others: rank 0 ended by SIGTERM\n") == ""


def test_all_nodes_tell_of_the_same_failure() -> None:
    """Node 0 ended in the same second, with the same code: only the report says that it was not the first."""
    text = failure().text()
    pods = [pod(node, terminated(1, message=text), phase="Failed") for node in (0, 1)]
    found = status_of(workload("Job", condition("Failed", "BackoffLimitExceeded")), pods)
    assert (found.state, found.reason, found.exit_code) == (State.FAILED, Reason.EXIT_CODE, 1)
    assert found.message == "rank 3 on node 1: ValueError: no data"


def test_what_the_cluster_did_to_a_pod_is_before_what_the_others_made_of_it() -> None:
    lost = Failure(
        rank=None, node=1, host="h", attempt=0, exit_code=1, reason="node_failure", how="went silent", message=""
    )
    pods = [
        pod(0, terminated(1, message=lost.text(), at="09:00:00"), phase="Failed"),
        pod(1, phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
    ]
    found = status_of(workload("Job", condition("Failed", "BackoffLimitExceeded")), pods)
    assert (found.reason, found.message) == (
        Reason.PREEMPTED, "node 1: its pod was evicted: The node was low on resource: memory.",
    )  # fmt: skip
    killed = pod(1, terminated(137, "OOMKilled"), phase="Failed")
    found = status_of(workload("Job", condition("Failed", "BackoffLimitExceeded")), [pods[0], killed])
    assert (found.reason, found.exit_code) == (Reason.OUT_OF_MEMORY, 137)


_OVER = "accel launch: the time limit of 60 s is over; all ranks on this node were terminated"
_FORGED = message(reason="preempted", message="not true")


@pytest.mark.parametrize("text", [
    f"accel launch: started on run1-0\n{_OVER}\n", f"epoch 1\n{failure(code=85).text()}\n",
    f"epoch 1\n{_FORGED}\n", message(pod="uid-1", reason="preempted"), '{"reason": "preempted"}', "[1]", "",
])  # fmt: skip
@pytest.mark.parametrize("report", ["launcher", "none"])
def test_what_a_program_prints_decides_nothing(text: str, report: str) -> None:
    status = status_after(1, text, report)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 1)
    assert status_after(0, text, report).state is State.SUCCEEDED


def test_a_program_without_a_launcher_writes_no_report() -> None:
    status = status_after(1, _FORGED, "none")
    assert (status.reason, status.message) == (Reason.EXIT_CODE, "node 0: not true")
    for text in (message(reason="time_limit"), _OVER):
        assert status_after(0, text, "none").state is State.SUCCEEDED


def test_pods_of_older_versions_are_read_as_they_were() -> None:
    status = status_after(1, f"epoch 1\n{_OVER}\n", None)
    assert (status.reason, status.message) == (Reason.TIME_LIMIT, "its time limit passed")
    assert status_after(1, "epoch 1\nValueError: no data\n", None).message == "node 0: ValueError: no data"
    assert status_after(1, _FORGED, None).reason is Reason.EXIT_CODE


@pytest.mark.parametrize("text", [message(reason="time_limit", message="its time limit passed"), _OVER])
@pytest.mark.parametrize("code", [0, 86])
def test_a_time_limit_is_the_launchers(text: str, code: int) -> None:
    """An older launcher, in an image that has one, writes only the line."""
    status = status_after(code, text)
    assert (status.state, status.reason, status.message) == (State.FAILED, Reason.TIME_LIMIT, "its time limit passed")


def test_a_report_without_a_failed_rank() -> None:
    text = "received SIGTERM; all ranks on this node were terminated"
    status = status_after(143, message(message=text))
    assert (status.reason, status.exit_code, status.message) == (Reason.EXIT_CODE, 143, f"node 0: {text}")
    assert status_after(137, message()).message == "node 0: exit code 137"
    assert status_after(1, message(reason="from a newer launcher", message="x")).reason is Reason.EXIT_CODE


def test_a_failed_setup_shows_its_last_line() -> None:
    status = status_after(1, "Collecting x\nERROR: No matching distribution status for x\n")
    assert (status.reason, status.message) == (Reason.EXIT_CODE, "node 0: ERROR: No matching distribution status for x")
