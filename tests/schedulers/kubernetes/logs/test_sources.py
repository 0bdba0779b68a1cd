"""Which logs a job's pods have, and who wrote their lines."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers.kubernetes.logs import sources
from schedulers.kubernetes.logs.cursor import LogChunk, Position

_DONE = {"terminated": {"exitCode": 0}}
_FAILED = {"terminated": {"exitCode": 1}}
_RUNS: dict[str, Any] = {"running": {}}
_WAITS: dict[str, Any] = {"waiting": {"reason": "CrashLoopBackOff"}}
_AT = Position("20261121T163300.000000000Z", 1)


def _pod(
    *containers: dict[str, Any], node: int = 0, uid: str = "01234567-89", phase: str = "Running", **more: Any
) -> Any:
    labels = {"batch.kubernetes.io/job-completion-index": str(node), **more.pop("labels", {})}
    command = more.pop("command", ["accel", "launch", "--", "train.py", "--tee", "3"])
    own = [each for each in containers if each["name"] == "pytorch"]
    return {
        "metadata": {"name": f"p{node}", "uid": uid, "labels": labels, **more},
        "spec": {"containers": [{"name": "pytorch", "command": command}]},
        "status": {
            "phase": phase,
            "containerStatuses": own,
            "initContainerStatuses": [each for each in containers if each not in own],
        },
    }


def _container(state: dict[str, Any], restarts: int = 0, last: Any = None, name: str = "pytorch") -> dict[str, Any]:
    return {"name": name, "state": state, "restartCount": restarts, "lastState": last or {}}


@pytest.mark.parametrize(
    ("container", "runs"),
    [
        (_container({"waiting": {"reason": "ContainerCreating"}}), []),
        (_container(_RUNS), [(0, "")]),
        (_container(_FAILED), [(0, "ended")]),
        (_container(_RUNS, 1, _FAILED), [(0, "previous"), (1, "")]),
        (_container(_WAITS, 1, _FAILED), [(0, "lost"), (1, "previous")]),
        (_container(_RUNS, 3, _FAILED), [(0, "lost"), (1, "lost"), (2, "previous"), (3, "")]),
        (_container(_RUNS, 2), [(0, "lost"), (1, "lost"), (2, "")]),
    ],
)
def test_the_runs_of_a_container_are_those_that_the_kubelet_keeps(container: dict[str, Any], runs: list[Any]) -> None:
    """The run before the current one is kept, and to the kubelet one that waits has none that is current."""
    found = [
        (each.run, "lost" if each.lost else "previous" if each.previous else "ended" if each.ended else "")
        for each in sources.list_sources([_pod(container)])
    ]
    assert found == runs


_THREE = [(0, False, True), (1, False, True), (2, False, False)]
_UNKNOWN = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}


@pytest.mark.parametrize(
    ("container", "runs"),
    [
        ({"restartCount": 1, "state": _UNKNOWN, "lastState": _UNKNOWN}, [(0, False, False)]),
        ({"restartCount": 3, "state": _UNKNOWN, "lastState": _UNKNOWN}, _THREE),
        ({"restartCount": 1, "state": {"waiting": {}}, "lastState": _UNKNOWN}, [(0, False, False)]),
        ({"restartCount": 0, "state": _UNKNOWN, "lastState": {}}, []),
    ],
)  # fmt: skip
def test_an_evicted_pod_s_container_has_not_run_once_more(container: dict[str, Any], runs: list[Any]) -> None:
    """The kubelet counts a restart for a container that ran when it was removed."""
    pod = {
        "metadata": {"name": "p", "uid": "0123456789", "labels": {"batch.kubernetes.io/job-completion-index": "0"}},
        "status": {"phase": "Failed", "reason": "Evicted", "containerStatuses": [{"name": "pytorch", **container}]},
    }
    found = sorted(sources.list_sources([pod]), key=lambda source: source.run)
    assert [(source.run, source.previous, source.lost) for source in found] == runs
    assert all(source.ended for source in found)


def test_names_tell_pods_apart_and_attempts_follow_each_other() -> None:
    first = _pod(_container(_FAILED), uid="aaaaaaaa-1", phase="Failed", creationTimestamp="2026-11-21T16:00:00Z")
    second = _pod(_container(_RUNS), uid="bbbbbbbb-2", creationTimestamp="2026-11-21T16:00:09Z")
    other = _pod(_container(_RUNS), node=1, uid="cccccccc-3", creationTimestamp="2026-11-21T16:00:01Z")
    found = sources.list_sources([second, other, first])
    assert [(each.name, each.attempt, each.rank) for each in found] == [
        ("node-0.aaaaaaaa.a0", 0, 0),
        ("node-1.cccccccc.a0", 0, 1),
        ("node-0.bbbbbbbb.a0", 1, 0),
    ]
    gang = _pod(_container(_RUNS), labels={"jobset.sigs.k8s.io/restart-attempt": "3"})
    assert [each.attempt for each in sources.list_sources([gang])] == [3]


def test_what_brought_the_code_comes_first_and_is_nobody_s_rank() -> None:
    found = sources.list_sources(
        [_pod(_container(_DONE, name="accel-code"), _container(_DONE, name="init-pytorch"), _container(_RUNS))]
    )
    assert [(each.name, each.rank) for each in found] == [
        ("node-0.01234567.accel-code.a0", None),
        ("node-0.01234567.a0", 0),
    ]


@pytest.mark.parametrize(
    ("tee", "head", "rank", "text"),
    [
        (True, b"[rank 12] a\n", 12, b"a\n"),
        (True, b"accel launch: 2 nodes\n", None, b"accel launch: 2 nodes\n"),
        (True, b"[rank x] a\n", None, b"[rank x] a\n"),
        (False, b"[rank 12] a\n", 0, b"[rank 12] a\n"),
    ],
)
def test_who_wrote_a_line(tee: bool, head: bytes, rank: int | None, text: bytes) -> None:
    command = ["accel", "launch", *(["--tee", "3"] if tee else []), "--", "train.py"]
    (source,) = sources.list_sources([_pod(_container(_RUNS), command=command)])
    assert sources.rank_of(source, LogChunk(head, head, True, _AT)) == (rank, text)


def test_a_step_of_a_progress_bar_is_of_the_rank_that_began_the_line() -> None:
    (source,) = sources.list_sources([_pod(_container(_RUNS), command=["accel", "launch", "--tee", "3", "--", "x"])])
    assert sources.rank_of(source, LogChunk(b" 20%\r", b"[rank 3]  10%\r 20%\r", False, _AT)) == (3, b" 20%\r")


@pytest.mark.parametrize("line", [b"  | Traceback", b"  error:  x", b"  cause:  x", b"  remedy: x", b"  log:    x"])
def test_a_report_is_the_launcher_s_and_a_program_s_like_words_are_its_own(line: bytes) -> None:
    piece = LogChunk(line, line, True, _AT)
    assert sources.is_launcher_line(piece, follows_launcher=True)
    assert not sources.is_launcher_line(piece, follows_launcher=False)
    first = b"accel launch: rank 0 on node 0 (n1) failed first"
    assert sources.is_launcher_line(LogChunk(first, first, True, _AT), follows_launcher=False)
