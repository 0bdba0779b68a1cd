"""The status of a job, derived from its object, pods and events."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...job import Reason, State, Status
from .. import names
from ..manifests import workloads
from . import pod_states, reasons
from .pod_states import is_true, join_message
from .reasons import ReasonAndMessage

Object = Mapping[str, Any]

# The condition of a succeeded job, by the kind of its object.
_SUCCEEDED: Mapping[str, str] = {
    "PyTorchJob": "Succeeded",
    "Job": "Complete",
    "JobSet": "Completed",
    "TrainJob": "Complete",
}
_FAILED = "Failed"
_FAILING = "FailureTarget"  # a failed Job's condition until its pods have ended
_LONGEST = 400
_UNKNOWN = "its pods are gone: its time limit may have ended it"


def status_of(
    workload: Object, pods: Sequence[Object] = (), events: Sequence[Object] = (), *, now: float | None = None
) -> Status:
    """Return the job's status.

    pods:   the job's pods.
    events: the events of its object, its pods and its other objects.
    now:    the cluster's time, to recognize pods that still end.

    Pods and events are optional. Never fails on unknown values.
    """
    workload, events = _without_nulls(workload), [_without_nulls(event) for event in events]
    kind, status = str(workload.get("kind")), workload.get("status") or {}
    pods = [_without_nulls({key: pod.get(key) for key in ("metadata", "spec", "status")}) for pod in pods]
    pods = [pod for pod in pods if names.node_of(pod) is not None]
    conditions = {
        str(condition.get("type")): condition for condition in status.get("conditions") or [] if is_true(condition)
    }
    restarts, limit = _restarts(kind, status, pods), _max_restarts(workload)
    attempt = restarts if limit is None else min(restarts, limit)
    native = _SUCCEEDED.get(kind, "Succeeded")
    if native in conditions:
        if _has_ending_pods(conditions[native], pods, now):
            return Status(state=State.RUNNING, attempt=attempt, message="it is ending", native_state=native)
        # The launchers of a PyTorchJob with restarts exit with 0 at the time limit, so that none is restarted.
        is_out_of_time, recorded = any(map(_out_of_time, pods)), _recorded_failure(workload)
        if recorded is not None and not is_out_of_time:
            return recorded
        if not is_out_of_time and (any(map(pod_states.over, pods)) or not _may_be_out_of_time(workload)):
            return Status(state=State.SUCCEEDED, exit_code=0, attempt=attempt, native_state=native)
        message, reason = pod_states.TIME_LIMIT_PASSED if is_out_of_time else _UNKNOWN, Reason.TIME_LIMIT
        return Status(state=State.FAILED, reason=reason, attempt=attempt, message=message, native_state=native)
    failed = conditions.get(_FAILED) or conditions.get(_FAILING)
    if failed is not None:
        if kind == "Job" and not _was_terminated(failed, status, pods):
            attempt = max(0, _failures(pods) - 1)  # the last failure had no further attempt
        end = _failed_status(workload, failed, pods, attempt)
        if _FAILED in conditions and not _has_ending_pods(failed, pods, now):
            return _recorded_failure(workload) or end
        message = _one_line(join_message("it has failed, and its pods are ending", end.message))
        return dataclasses.replace(end, state=State.RUNNING, exit_code=None, message=message)
    if (workload.get("metadata") or {}).get("deletionTimestamp"):
        running = any(pod_states.running(pod) for pod in pods)
        state = State.RUNNING if running else State.QUEUED
        return Status(state=state, attempt=attempt, message="it is being deleted", native_state="Deleting")
    spec = workload.get("spec") or {}
    if "Suspended" in conditions or spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"):
        return _suspended_status(workload, attempt)
    restartable = _restarts_again(kind, restarts, limit)
    return _unfinished_status(workload, conditions, pods, events, attempt, restartable=restartable)


def status_when_gone(kind: str, pods: Sequence[Object], now: float, *, ttl: bool = False) -> Status:
    """Return the status of a job whose object is gone. `ttl`: True if the cluster removes jobs by itself."""
    pods = [pod for pod in pods if names.node_of(pod) is not None and pod_states.is_alive(pod, now)]
    if pods:
        state = State.RUNNING if any(map(pod_states.running, pods)) else State.QUEUED
        message = f"its {kind} is deleted, and its pods are ending"
        return Status(state=state, message=message, native_state="Deleting")
    message = f"its {kind} is gone: it was cancelled from another machine, or somebody deleted it"
    if ttl:
        message = f"its {kind} is gone: its ttl_s passed before its end was seen, or somebody deleted it"
    return Status(state=State.FAILED, reason=Reason.LOST, native_state="Deleted", message=message)


def is_over(kind: str, workload: Object | None, pods: Sequence[Object], now: float) -> bool:
    """Return True if the job has ended and its pods too. `workload`: None if the object is gone."""
    return (status_when_gone(kind, pods, now) if workload is None else status_of(workload, pods, now=now)).state.final


def _failed_status(workload: Object, condition: Object, pods: Sequence[Object], attempt: int) -> Status:
    condition_message, condition_reason = str(condition.get("message") or ""), str(condition.get("reason"))
    ends = pod_states.ends(pods)
    if condition_reason == workloads.FAILED_FOR_GOOD:
        condition_reason = workloads.why_for_good(workload, (end.code for end in ends))
    reason, message = reasons.JOB.get(condition_reason, (Reason.EXIT_CODE, ""))
    for phrase, meaning in reasons.JOB_MESSAGES:
        if phrase in condition_message:
            reason, message = meaning
    end = min(ends, key=lambda candidate: candidate.order, default=None)
    limit = _max_restarts(workload)
    if reasons.BACK_OFF in condition_message and workload.get("kind") == "PyTorchJob" and limit is not None:
        attempt = limit  # the operator has deleted the pods that would show it
    if reason is not Reason.TIME_LIMIT and end is not None:
        if reason in (Reason.SETUP, Reason.PREEMPTED) and end.reason is Reason.EXIT_CODE:
            message = join_message(message, end.message)
        else:
            reason, message = end.reason, str(end)
    code = end.code if end is not None and reason is not Reason.TIME_LIMIT else None
    return Status(
        state=State.FAILED,
        reason=reason,
        exit_code=code or None,
        attempt=attempt,
        message=_one_line(message or condition_message),
        native_state=f"Failed: {condition['reason']}" if condition.get("reason") else "Failed",
    )


def _has_ending_pods(final: Object, pods: Sequence[Object], now: float | None) -> bool:
    """Return True while pods of a finished job still terminate within their grace periods."""
    now = time.time() if now is None else now
    finished_at = pod_states.moment(final.get("lastTransitionTime"))
    return any(pod_states.is_ending(pod, finished_at, now) for pod in pods)


def _unfinished_status(
    workload: Object,
    conditions: Mapping[str, Object],
    pods: Sequence[Object],
    events: Sequence[Object],
    attempt: int,
    *,
    restartable: bool,
) -> Status:
    """Return the status of a job that is neither over nor suspended. `restartable`: failed pods are restarted."""
    active = [pod for pod in pods if not pod_states.over(pod)]
    running = [pod for pod in active if pod_states.running(pod)]
    expected = nodes_of(workload)
    reason, message = _obstacle(workload, active, events, has_pods=bool(pods))
    native = next((name for name in ("Restarting", "Running", "Created") if name in conditions), "")
    unresponsive = next((pod for pod in sorted(running, key=pod_states.node_of) if _is_node_silent(pod, events)), None)
    running_status = functools.partial(Status, state=State.RUNNING, attempt=attempt, native_state=native or "Running")
    if unresponsive is not None:
        message = f"node {pod_states.node_of(unresponsive)}: its node does not answer"
        return running_status(reason=Reason.NODE_FAILURE, message=message)
    if running or (not pods and "Running" in conditions):
        if expected is not None and len(running) < expected and message:
            return running_status(reason=reason, message=_one_line(f"{len(running)} of {expected} pods run; {message}"))
        return running_status()
    if reason is Reason.NONE and not message:
        ended_pods = [pod for pod in pods if pod_states.over(pod) or pod_states.ends([pod])]
        end = min(pod_states.ends(ended_pods), key=lambda candidate: candidate.order, default=None)
        if end is not None and restartable:
            reason, message = end.reason, f"it is started again: {end}"
        elif ended_pods:
            # Only the runtime of a TrainJob has the limit of restarts.
            open_end = workload.get("kind") == "TrainJob"
            message = "its pods have ended; it ends, or is started again" if open_end else "it is ending"
            return Status(state=State.RUNNING, attempt=attempt, message=message, native_state=native)
    # Some pods have ended and none will restart: the job is ending.
    state = State.RUNNING if not restartable and any(map(pod_states.over, pods)) else State.QUEUED
    return Status(
        state=state, reason=reason, attempt=attempt, message=_one_line(message), native_state=native or "Pending"
    )


def _suspended_status(workload: Object, attempt: int) -> Status:
    queue = ((workload.get("metadata") or {}).get("labels") or {}).get(names.KUEUE_QUEUE)
    if queue:
        reason, message = Reason.NO_CAPACITY, f"it waits for its turn in queue {queue}"
    else:
        reason, message = Reason.USER, "it is suspended until `suspend` is removed from its spec"
    return Status(state=State.QUEUED, reason=reason, attempt=attempt, message=message, native_state="Suspended")


def _obstacle(
    workload: Object, pods: Sequence[Object], events: Sequence[Object], *, has_pods: bool
) -> ReasonAndMessage:
    """Return the reason why pods do not run: the most serious one, of the lowest node."""
    obstacles = [
        (reason, f"node {pod_states.node_of(pod)}: {summary}")
        for pod in sorted(pods, key=pod_states.node_of)
        for reason, summary in waiting_reason(pod, events)
    ]
    if not has_pods or not obstacles:
        obstacles += _refusals(workload, events)
    setup_obstacles = [obstacle for obstacle in obstacles if obstacle[0] is Reason.SETUP]
    return next(iter(setup_obstacles or obstacles), (Reason.NONE, ""))


def waiting_reason(pod: Object, events: Sequence[Object]) -> Iterable[ReasonAndMessage]:
    """Yield the reasons why this pod does not run. `events` may include those of other objects."""
    status = pod.get("status") or {}
    pod_reason = pod_states.reason_of(pod)
    if pod_reason is not None:
        yield pod_reason
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            gated = condition.get("reason") == "SchedulingGated"
            detail = "" if gated else str(condition.get("message") or "")
            reason, summary = Reason.NO_CAPACITY, "a scheduling gate holds it" if gated else "no node fits"
            if reasons.NO_CLAIM.search(detail):
                reason, summary = Reason.SETUP, "a volume claim does not exist"
            yield reason, join_message(summary, detail)
    for container in pod_states.containers(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if not waiting or pod_states.running(pod):
            continue
        kubelet_reason = str(waiting.get("reason") or "")
        reason, summary = reasons.WAITING.get(kubelet_reason, (Reason.SETUP, kubelet_reason))
        if reason is Reason.NONE:
            continue
        end = pod_states.last_end(container, pod)
        if kubelet_reason == "CrashLoopBackOff" and end is not None:
            reason, summary = end.reason, join_message(summary, end.message)
        else:
            # A missing Secret, ConfigMap or key is unrelated to the image.
            image = "" if kubelet_reason == "CreateContainerConfigError" else str(container.get("image") or "")
            summary = join_message(summary, _advised(str(waiting.get("message") or ""), image))
        yield reason, summary
    if status.get("phase") == "Pending" and not pod_states.running(pod):
        # Only events show that a scheduled pod waits for volumes or a sandbox.
        for event in _newest(events):
            if _involves(event, "Pod", pod) and event.get("reason") in reasons.POD_EVENTS:
                transient = any(phrase in str(event.get("message")) for phrase in reasons.TRANSIENT_MESSAGES)
                if event.get("reason") == "FailedScheduling" or transient:
                    continue
                reason, summary = reasons.POD_EVENTS[str(event["reason"])]
                yield reason, join_message(summary, event.get("message"))
                break


def _refusals(workload: Object, events: Sequence[Object]) -> Iterable[ReasonAndMessage]:
    """Yield the reason why pods cannot be created, from events of the objects that create them."""
    for event in _newest(events):
        is_refusal = str(event.get("reason", "")).startswith(reasons.REFUSALS)
        if event.get("type") != "Warning" or not is_refusal or _involved_name(event, "Pod") is not None:
            continue
        kind = str(workload.get("kind"))
        if _involved_name(event, kind) == pod_states.name(workload) and not _involves(event, kind, workload):
            continue
        detail = str(event.get("message") or "")
        for phrase, (reason, summary) in reasons.EVENTS:
            if phrase in detail:
                yield reason, join_message(summary, detail)
                return
        reason, summary = reasons.POD_EVENTS.get(str(event["reason"]), (Reason.SETUP, "its pods cannot be created"))
        yield reason, join_message(summary, detail)
        return


def _restarts(kind: str, status: Object, pods: Sequence[Object]) -> int:
    """Return the number of restarts. A Job's may include one that its limit forbids."""
    labels = [(pod.get("metadata") or {}).get("labels") or {} for pod in pods]
    counts = [int(label) for entry in labels if (label := str(entry.get(names.RESTART_ATTEMPT, ""))).isdigit()]
    if kind == "JobSet":
        return int(status.get("restarts") or max(counts, default=0))
    if kind == "PyTorchJob":
        counts = [int(entry.get("restartCount") or 0) for pod in pods for entry in pod_states.containers(pod)]
    elif kind == "Job":
        return _failures(
            [pod for pod in pods if not any(end.code in workloads.FINAL for end in pod_states.ends([pod]))]
        )
    return max(counts, default=0)


def _failures(pods: Sequence[Object]) -> int:
    """Return the largest number of failed pods of one node."""
    nodes = [pod_states.node_of(pod) for pod in pods if pod_states.phase(pod) == "Failed"]
    return max(map(nodes.count, nodes), default=0)


def _max_restarts(workload: Object) -> int | None:
    """Return the allowed restarts, or None if unknown. The kubelet may exceed them by one before operators count."""
    spec, kind = workload.get("spec") or {}, workload.get("kind")
    if kind == "JobSet":
        policy = spec.get("failurePolicy")
        return None if policy is None else int(policy.get("maxRestarts") or 0)
    if kind == "Job":
        backoff_limit = spec.get("backoffLimit")
        return None if backoff_limit is None else int(backoff_limit) // int(spec.get("completions") or 1)
    if kind == "PyTorchJob":
        replicas = (spec.get("pytorchReplicaSpecs") or {}).values()
        if any(replica.get("restartPolicy") == "Never" for replica in replicas):
            return 0
        elastic = (spec.get("elasticPolicy") or {}).get("maxRestarts")
        if elastic is not None:
            return int(elastic)
        backoff_limit = (spec.get("runPolicy") or {}).get("backoffLimit")
        return (
            None
            if backoff_limit is None
            else max(0, int(backoff_limit) - 1) // sum(int(replica.get("replicas") or 1) for replica in replicas)
        )
    return None


def _out_of_time(pod: Object) -> bool:
    """Return True if the pod's launcher exited because the job's time limit had passed."""
    for container in pod_states.containers(pod):
        terminated = (container.get("state") or {}).get("terminated") or {}
        report, _ = pod_states.report_and_detail(pod, container, terminated)
        if report is not None and report.reason is Reason.TIME_LIMIT:
            return True
    return False


def _recorded_failure(workload: Object) -> Status | None:
    """Return the failure that accel recorded on the object while its pods existed, or None."""
    text = ((workload.get("metadata") or {}).get("annotations") or {}).get(names.END)
    with contextlib.suppress(ValueError, RecursionError):
        status = Status.from_json(json.loads(str(text)))
        return status if status.state is State.FAILED else None
    return None


def _may_be_out_of_time(workload: Object) -> bool:
    """Return True if the launchers may have exited with 0 at a time limit, which only their pods show."""
    specs = ((workload.get("spec") or {}).get("pytorchReplicaSpecs") or {}).values()
    env = {
        variable.get("name"): variable.get("value")
        for replica in specs
        for container in ((replica.get("template") or {}).get("spec") or {}).get("containers") or []
        for variable in container.get("env") or []
    }
    limit = str(env.get("ACCEL_TIME_LIMIT", ""))
    if env.get("ACCEL_TIME_LIMIT_EXIT") != "0,0" or not limit.isdecimal():
        return False
    status = workload.get("status") or {}
    started_at, completed_at = (pod_states.moment(status.get(key)) for key in ("startTime", "completionTime"))
    return started_at is None or completed_at is None or completed_at - started_at >= int(limit)


def _restarts_again(kind: str, restarts: int, limit: int | None) -> bool:
    """Return True if another attempt follows a failure, as far as the object shows."""
    if kind == "Job":
        return restarts > 0 and (limit is None or restarts <= limit)
    return limit is not None and restarts < limit


def _was_terminated(failed: Object, status: Object, pods: Sequence[Object]) -> bool:
    """Return True if the last attempt's pods were deleted at the deadline: the Job still counts them as failed."""
    failed_count = sum(pod_states.phase(pod) == "Failed" for pod in pods)
    return failed.get("reason") == "DeadlineExceeded" and int(status.get("failed") or 0) > failed_count


def nodes_of(workload: Object) -> int | None:
    """Return the job's minimum number of nodes, or None if its object does not specify it."""
    spec = workload.get("spec") or {}
    kind = workload.get("kind")
    if kind == "PyTorchJob":
        counts = [int(replica.get("replicas") or 1) for replica in (spec.get("pytorchReplicaSpecs") or {}).values()]
        min_replicas = (spec.get("elasticPolicy") or {}).get("minReplicas")
        return int(min_replicas) if min_replicas else sum(counts)
    if kind == "Job":
        return int(spec.get("completions") or 1)
    if kind == "JobSet":
        jobs = [(replica, replica.get("template", {}).get("spec", {})) for replica in spec.get("replicatedJobs") or []]
        return sum(int(replica.get("replicas", 1)) * int(job.get("completions") or 1) for replica, job in jobs)
    nodes = (spec.get("trainer") or {}).get("numNodes")
    return int(nodes) if nodes else None


def _is_node_silent(pod: Object, events: Sequence[Object]) -> bool:
    """Return True if the pod's node has stopped reporting since the pod ran."""
    return pod_states.not_ready(pod) and any(
        event.get("reason") == "NodeNotReady" and _involves(event, "Pod", pod) for event in events
    )


def has_missing_pods(workload: Object, pods: Sequence[Object]) -> bool:
    """Return True if fewer pods run than the job needs: events may show the reason."""
    expected = nodes_of(workload)
    return expected is not None and sum(map(pod_states.running, pods)) < expected


def _involved_name(event: Object, kind: str) -> str | None:
    """Return the name of the event's object if it has that kind, else None. Supports both event APIs."""
    reference = event.get("involvedObject") or event.get("regarding") or {}
    return str(reference.get("name")) if reference.get("kind") == kind else None


def _involves(event: Object, kind: str, resource: Object) -> bool:
    """Return True if the event is about this object, not an earlier one of the same name."""
    reference = event.get("involvedObject") or event.get("regarding") or {}
    uid = (resource.get("metadata") or {}).get("uid")
    return _involved_name(event, kind) == pod_states.name(resource) and (
        not uid or reference.get("uid") in (None, "", uid)
    )


def _newest(events: Sequence[Object]) -> list[Object]:
    def time_of(event: Object) -> str:
        series = event.get("series") or {}
        return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")

    normalized = [{**event, "message": event.get("message") or event.get("note")} for event in events]
    return sorted(normalized, key=time_of, reverse=True)


def _advised(message: str, image: str) -> str:
    for phrase, advice in reasons.ADVICE:
        if phrase in message:
            return advice
    return message if image in message else f"{image} ({message})" if message else image


def _without_nulls(value: Any) -> Any:
    """Return the value without nulls, which some clients keep for unset fields."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(child) for key, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value if child is not None] if isinstance(value, list) else value


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
