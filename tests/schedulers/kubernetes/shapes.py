"""What API servers say of jobs, pods and events: their documented shapes, with what a state is read from."""

from __future__ import annotations

import time
from typing import Any

Object = dict[str, Any]
_OPERATOR = "training.kubeflow.org/"


def workload(kind: str, *conditions: Object, nodes: int = 2, status: Object | None = None, **metadata: Any) -> Object:
    specs: dict[str, Object] = {
        "PyTorchJob": {"pytorchReplicaSpecs": {"Master": {"replicas": 1}, "Worker": {"replicas": nodes - 1}}},
        "Job": {"completions": nodes},
        "JobSet": {"replicatedJobs": [{"name": "node", "template": {"spec": {"completions": nodes}}}]},
        "TrainJob": {"trainer": {"numNodes": nodes}},
    }
    return {
        "kind": kind,
        "metadata": {"name": "run1", **metadata},
        "spec": specs[kind],
        "status": {"conditions": list(conditions), **(status or {})},
    }


def condition(type_: str, reason: str = "", message: str = "", status: str = "True", at: str = "") -> Object:
    found = {"type": type_, "status": status, "reason": reason, "message": message}
    return {**found, "lastTransitionTime": at} if at else found


def seconds_ago(seconds: float) -> str:
    """A time as API servers write it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))


def pod(
    node: int = 0,
    *containers: Object,
    phase: str = "Running",
    init: tuple[Object, ...] = (),
    conditions: tuple[Object, ...] = (),
    operator: bool = False,
    labels: dict[str, str] | None = None,
    deleted: bool = False,
    restart: str = "Never",
    uid: str | None = None,
    **status: Any,
) -> Object:
    role = {
        f"{_OPERATOR}replica-type": "worker" if node else "master",
        f"{_OPERATOR}replica-index": str(max(0, node - 1)),
    }
    index = {"batch.kubernetes.io/job-completion-index": str(node)}
    return {
        "metadata": {
            "name": f"run1-{node}",
            "labels": {**(role if operator else index), **(labels or {})},
            **({} if uid is None else {"uid": uid}),
            **({"deletionTimestamp": seconds_ago(-10)} if deleted else {}),
        },
        "spec": {"restartPolicy": restart, "terminationGracePeriodSeconds": 30},
        "status": {
            "phase": phase,
            "conditions": list(conditions),
            "initContainerStatuses": list(init),
            "containerStatuses": list(containers),
            **status,
        },
    }


def running(restarts: int = 0, last: Object | None = None, name: str = "pytorch") -> Object:
    state = {"running": {"startedAt": "2026-11-21T10:00:00Z"}}
    return {"name": name, "restartCount": restarts, "state": state, "lastState": {"terminated": last} if last else {}}


def waiting(reason: str, message: str = "", name: str = "pytorch", **more: Any) -> Object:
    said = {"reason": reason, **({"message": message} if message else {})}
    return {"name": name, "image": "example.org/train:2", "restartCount": 0, "state": {"waiting": said}, **more}


def terminated(
    code: int, reason: str = "Error", message: str = "", at: str = "10:00:00", name: str = "pytorch"
) -> Object:
    return {"name": name, "restartCount": 0, "state": {"terminated": ended(code, reason, message, at)}}


def ended(code: int, reason: str = "Error", message: str = "", at: str = "10:00:00") -> Object:
    return {"exitCode": code, "reason": reason, "message": message, "finishedAt": f"2026-11-21T{at}Z"}


def event(
    reason: str, message: str, about: str = "Pod/run1-0", type_: str = "Warning", at: str = "10:00:00", uid: str = ""
) -> Object:
    kind, _, name = about.partition("/")
    when = f"2026-11-21T{at}Z"
    return {"type": type_, "reason": reason, "message": message, "lastTimestamp": when,
            "involvedObject": {"kind": kind, "name": name, **({"uid": uid} if uid else {})}}  # fmt: skip
