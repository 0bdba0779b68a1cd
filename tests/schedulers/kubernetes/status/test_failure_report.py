"""The launcher's report, read from the end of a container's log: held to what the launcher writes."""

from __future__ import annotations

import signal

import pytest

from accel.launch import failure as failures
from accel.launch.failure import Exit, Failure, diagnose
from schedulers import Reason, State
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
    return found


def test_who_failed_first_and_how() -> None:
    found = read(failure())
    assert (found.failed_rank, found.node, found.reason, found.message) == (
        "rank 3 on node 1", 1, Reason.EXIT_CODE, "ValueError: no data",
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
    for _, reason, cause, _ in failures._KNOWN_CAUSES:
        one = Failure(
            rank=0, node=0, host="h", attempt=0, exit_code=1, how="exited with code 1", message="", cause=cause
        )
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
