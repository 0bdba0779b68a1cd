"""States of jobs from the answers of an API server to lists: jobs that are deleted, and which questions are asked."""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import pytest

from schedulers import Reason, State, Status
from schedulers.kubernetes import cleanup
from schedulers.kubernetes.native_id import Native
from schedulers.kubernetes.status import query, watch
from tests.schedulers.kubernetes.shapes import condition, event, pod, running, terminated, workload
from tests.schedulers.kubernetes.support import least

from ..conftest import MakeApi
from ..servers import reply, serving

_NATIVE = Native("trainjob", "team", "run1-2mxaaaaaaaa", "2mxaaaaaaaa")
_GONE = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}


def _cluster(objects: Mapping[str, Any], ahead_s: float = 0) -> Callable[[Any], None]:
    """A server that has these objects, by the last part of their path; nothing is there under any other name.
    `ahead_s`: of its clock."""

    def answer(handler: Any) -> None:
        handler.date_time_string = lambda: email.utils.formatdate(time.time() + ahead_s, usegmt=True)
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


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_times_of_the_cluster_are_compared_with_its_own_clock(make: MakeApi, ahead_s: int, tmp_path: Path) -> None:
    """Whatever the clock of this machine says."""
    for age_s, ends in ((10, True), (300, False)):
        deleted = _labelled(pod(0, running(name="node")), deletionTimestamp=_at(ahead_s - age_s))
        failed = workload("Job", condition("Failed", "BackoffLimitExceeded", at=_at(ahead_s - age_s)))
        plain = _labelled(pod(0, running(name="node")))
        with serving(_cluster({"pods": [deleted], "run1": None}, ahead_s)) as server:
            gone = query.statuses(make(server.url), [_NATIVE])[0][str(_NATIVE)]
            assert cleanup.cancel_rest(make(server.url), _NATIVE, tmp_path) is ends
        assert gone.state is (State.RUNNING if ends else State.FAILED)
        native = Native("job", "team", "run1", _NATIVE.job_id)
        with serving(_cluster({"pods": [plain], "run1": failed, "events": []}, ahead_s)) as server:
            over = query.statuses(make(server.url), [native])[0][str(native)]
        assert over.state is (State.RUNNING if ends else State.FAILED)


def test_why_a_job_failed_is_kept_when_its_pods_are_gone(make: MakeApi) -> None:
    """By the first who sees it, with the job's object; whoever asks later has it from there."""
    native = Native("job", "team", "run1", _NATIVE.job_id)
    made = workload("Job", condition("Failed", "BackoffLimitExceeded"))
    pods = [_labelled(pod(1, terminated(7, message="ValueError: no data\n"), phase="Failed"))]
    noted: list[dict[str, Any]] = []

    def patched(handler: Any) -> None:
        body = json.loads(handler.asked)
        noted.append(body)
        made["metadata"]["annotations"] = body["metadata"]["annotations"]
        reply(handler, made)

    there = {"run1": made, "pods": pods, "events": []}

    def answer(handler: Any) -> None:
        (patched if handler.command == "PATCH" else _cluster(there))(handler)

    with serving(answer) as server:
        first = query.statuses(make(server.url), [native])[0][str(native)]
        assert query.statuses(make(server.url), [native])[0][str(native)] == first
        there["pods"] = []
        later = query.statuses(make(server.url), [native])[0][str(native)]
    assert len(noted) == 1
    assert later == first
    assert (later.exit_code, later.message) == (7, "node 1: ValueError: no data")


def test_not_being_allowed_to_note_the_end_is_asked_once(make: MakeApi) -> None:
    native = Native("job", "team", "run1", _NATIVE.job_id)
    failed = workload("Job", condition("Failed", "BackoffLimitExceeded"))
    there = {"run1": failed, "pods": [_labelled(pod(0, terminated(7), phase="Failed"))], "events": []}

    def answer(handler: Any) -> None:
        if handler.command == "PATCH":
            handler.send_error(403)
        else:
            _cluster(there)(handler)

    with serving(answer) as server:
        api = make(server.url)
        codes = [query.statuses(api, [native])[0][str(native)].exit_code for _ in range(3)]
        assert [each.partition(" ")[0] for each in server.asked].count("PATCH") == 1
    assert codes == [7, 7, 7]


def test_a_later_object_of_the_same_name_is_not_the_job(make: MakeApi, tmp_path: Path) -> None:
    """Such as the next install of a chart's job, with the same values."""
    native = Native("job", "team", "run1", _NATIVE.job_id, "u-1")
    pods = [_labelled(pod(0, running())), _labelled(pod(1, running()))]
    objects = {"run1": workload("Job", uid="u-2"), "pods": pods, "events": []}
    lost = _status(make, objects, native)
    assert (lost.state, lost.reason, lost.native_state) == (State.FAILED, Reason.LOST, "Deleted")
    assert _status(make, objects, dataclasses.replace(native, uid="u-2")).state is State.RUNNING
    with serving(_cluster(objects)) as server:
        assert not cleanup.cancel_rest(make(server.url), native, tmp_path)
        cleanup.cancel(make(server.url), native, tmp_path)
        assert not any(each.startswith("DELETE") for each in server.asked)
    over = _labelled(workload("Job", condition("Complete"), uid="u-2", labels={}))
    for uid, deletes in (("u-1", False), ("u-2", True)):
        with serving(_cluster({"jobs": [over], "services": [], "configmaps": []})) as server:
            mine = dataclasses.replace(native, uid=uid)
            assert cleanup.clear(make(server.url), least(workload="job"), [mine]) == []
            assert any(each.startswith("DELETE") for each in server.asked) is deletes


def test_deletion_is_in_the_background_and_frees_an_object_that_hangs(make: MakeApi, tmp_path: Path) -> None:
    """In the foreground Trainer's webhook keeps the garbage collector from the last step."""
    with serving(_cluster({"pods": [], _NATIVE.name: {"kind": "TrainJob"}})) as server:
        cleanup.cancel(make(server.url), _NATIVE, tmp_path)
        (deleted,) = [path for path in server.asked if path.startswith("DELETE")]
    assert parse_qs(urlsplit(deleted).query) == {"propagationPolicy": ["Background"]}


def test_what_runs_on_after_the_end_is_cancelled(make: MakeApi, tmp_path: Path) -> None:
    """A PyTorchJob fails when one pod does; others may wait for it for half an hour."""
    ended = _labelled(pod(1, terminated(1, name="node"), phase="Failed"))
    waits = _labelled(pod(0, running(name="node")))
    for pods, still_runs in (([ended], False), ([ended, waits], True)):
        with serving(_cluster({"pods": pods, "log": b"", _NATIVE.name: {"kind": "TrainJob"}})) as server:
            assert cleanup.cancel_rest(make(server.url), _NATIVE, tmp_path) is still_runs
            assert any(each.startswith("DELETE") for each in server.asked) is still_runs


def test_a_running_job_that_lacks_pods_says_why(make: MakeApi) -> None:
    """After a restart the next pods may be refused."""
    native = Native("job", "team", "run1", _NATIVE.job_id)
    refusal = event("FailedCreate", 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', "Job/run1")
    objects = {"run1": workload("Job"), "pods": [_labelled(pod(0, running()))], "events": [refusal]}
    found = _status(make, objects, native)
    assert (found.state, found.reason) == (State.RUNNING, Reason.SETUP)
    assert found.message.startswith("1 of 2 pods run; the namespace's Pod Security Standard refuses its pods")


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (None, State.FAILED)])
def test_an_end_after_the_time_limit_is_that_of_the_pod_that_was_watched(
    make: MakeApi, monkeypatch: pytest.MonkeyPatch, code: int | None, state: State
) -> None:
    """Its pod is deleted. Of one that was last seen running the end is unknown."""
    native = dataclasses.replace(_NATIVE, workload="pytorchjob")
    limited = [{"name": "ACCEL_TIME_LIMIT", "value": "60"}, {"name": "ACCEL_TIME_LIMIT_EXIT", "value": "0,0"}]
    job = workload("PyTorchJob", condition("Succeeded"), nodes=1, name=native.name, uid=native.uid)
    template = {"spec": {"containers": [{"name": "pytorch", "env": limited}]}}
    job["spec"]["pytorchReplicaSpecs"] = {"Master": {"replicas": 1, "template": template}}
    last = pod(0, running() if code is None else terminated(code), phase="Running" if code is None else "Succeeded")
    watcher = Mock(**{"snapshot.return_value": None, "deleted_pods.return_value": [last]})
    monkeypatch.setattr(watch, "running", lambda api, native: watcher)
    assert _status(make, {native.name: job, "pods": []}, native).state is state
