"""States of jobs from the answers of an API server to lists: jobs that are deleted, and which questions are asked."""

from __future__ import annotations

import datetime
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from schedulers import Reason, State, Status
from schedulers.kubernetes import cancel
from schedulers.kubernetes.native_id import Native
from schedulers.kubernetes.status import query
from tests.schedulers.kubernetes.shapes import event, pod, running, terminated, workload

from ..conftest import MakeApi
from ..servers import Answer, reply, serving

_NATIVE = Native("trainjob", "team", "run1-2mxaaaaaaaa", "2mxaaaaaaaa")
_GONE = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}


def _cluster(objects: Mapping[str, Any]) -> Answer:
    """A server that has these objects, by the last part of their path; nothing is there under any other name."""

    def answer(handler: Any) -> None:
        at = urlsplit(handler.path)
        found = objects.get(at.path.rpartition("/")[2])
        if callable(found):
            found = found({key: value[0] for key, value in parse_qs(at.query).items()})
        if found is None:
            handler.send_error(404)
        else:
            reply(handler, {"items": found, "metadata": {}} if isinstance(found, list) else found)

    return answer


def _labelled(made: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    made["metadata"]["labels"]["accel.dev/job-id"] = _NATIVE.job_id
    made["metadata"] |= metadata
    return made


def _status(make: MakeApi, objects: Mapping[str, Any], native: Native = _NATIVE) -> Status:
    with serving(_cluster(objects)) as server:
        found, silent = query.statuses(make(server.url), [native])
    assert not silent
    return found[str(native)]


def _at(seconds: float) -> str:
    """So many seconds from now, as API servers write it."""
    return f"{datetime.datetime.fromtimestamp(time.time() + seconds, datetime.timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def test_a_deleted_job_is_over_when_its_pods_are_gone(make: MakeApi) -> None:
    """Deletion in the background takes the object first; its pods may need their whole grace."""
    ending = _status(make, {"pods": [_labelled(pod(0, running(name="node")), deletionTimestamp=_at(30))]})
    assert (ending.state, ending.native_state) == (State.RUNNING, "Deleting")
    assert ending.message == "its TrainJob is deleted, and its pods are ending"
    waiting = _status(make, {"pods": [_labelled(pod(0, phase="Pending"))]})
    assert waiting.state is State.QUEUED
    for rest in ([], [_labelled(pod(0, terminated(143, name="node"), phase="Failed"))]):
        over = _status(make, {"pods": rest})
        assert (over.state, over.reason, over.native_state) == (State.FAILED, Reason.LOST, "Deleted")


def test_a_pod_of_a_lost_node_holds_up_no_deleted_job(make: MakeApi) -> None:
    """Nobody takes it out of the API server while its node is silent, however long ago it was to end."""
    lost = _status(make, {"pods": [_labelled(pod(0, running(name="node")), deletionTimestamp=_at(-3600))]})
    assert (lost.state, lost.reason) == (State.FAILED, Reason.LOST)


def test_deletion_is_in_the_background_and_frees_an_object_that_hangs(make: MakeApi, tmp_path: Path) -> None:
    """In the foreground Trainer's webhook keeps the garbage collector from the last step."""
    with serving(_cluster({"pods": [], _NATIVE.name: {"kind": "TrainJob"}})) as server:
        cancel.cancel(make(server.url), _NATIVE, tmp_path)
        (deleted,) = [path for path in server.asked if path.startswith("DELETE")]
    assert parse_qs(urlsplit(deleted).query) == {"propagationPolicy": ["Background"]}


def test_what_runs_on_after_the_end_is_cancelled(make: MakeApi, tmp_path: Path) -> None:
    """A PyTorchJob fails when one pod does; others may wait for it for half an hour."""
    ended = _labelled(pod(1, terminated(1, name="node"), phase="Failed"))
    waits = _labelled(pod(0, running(name="node")))
    for pods, still_runs in (([ended], False), ([ended, waits], True)):
        with serving(_cluster({"pods": pods, "log": b"", _NATIVE.name: {"kind": "TrainJob"}})) as server:
            assert cancel.cancel_rest(make(server.url), _NATIVE, tmp_path) is still_runs
            assert any(each.startswith("DELETE") for each in server.asked) is still_runs


def test_a_running_job_that_lacks_pods_says_why(make: MakeApi) -> None:
    """After a restart the next pods may be refused."""
    native = Native("job", "team", "run1", _NATIVE.job_id)
    refusal = event("FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', "Job/run1")
    objects = {"run1": workload("Job"), "pods": [_labelled(pod(0, running()))], "events": [refusal]}
    found = _status(make, objects, native)
    assert (found.state, found.reason) == (State.RUNNING, Reason.SETUP)
    assert found.message.startswith("1 of 2 pods run; the namespace's Pod Security Standard refuses its pods")
