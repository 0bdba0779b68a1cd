"""Where a job is, from what the cluster says of its object, its pods and their events: dicts in, a `Status` out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..job import Reason, State, Status
from . import jobset, names, reasons, reports
from .reasons import Meaning

Object = Mapping[str, Any]

# The conditions (any with status True) that end a job, by the kind of its object.
_SUCCEEDED: Mapping[str, str] = {
    "PyTorchJob": "Succeeded",
    "Job": "Complete",
    "JobSet": "Completed",
    "TrainJob": "Complete",
}
_FAILED = "Failed"
_LONGEST = 400
# The echoes of another rank's failure: the launcher was told to end, or was killed when it did not.
_ECHOES = (143, 137)


@dataclass(frozen=True, kw_only=True)
class _End:
    """How a pod's container ended.

    who:   what failed first, in words: a node, or the rank that the launchers told of.
    grade: how sure it is that this was the first: 0 what the cluster did to the pod, 1 what the launchers agreed on.
    """

    who: str
    node: int
    when: str
    code: int
    reason: Reason
    message: str
    grade: int = 2

    @property
    def order(self) -> tuple[int, bool, str, int]:
        """The first failure is no echo, and the earliest; seconds are as fine as the cluster tells."""
        return self.grade, self.code in _ECHOES and self.reason is Reason.EXIT_CODE, self.when, self.node

    def __str__(self) -> str:
        return _joined(self.who, self.message)


def status_of(workload: Object, pods: Sequence[Object] = (), events: Sequence[Object] = ()) -> Status:
    """Where the job is. `pods` are its pods, `events` those of its object, its pods and what else belongs to it.

    Says what can be said of the job without pods and events; never fails for what it does not know.
    """
    workload, events = _without_nulls(workload), [_without_nulls(event) for event in events]
    kind, status = str(workload.get("kind")), workload.get("status") or {}
    pods = [_without_nulls({key: pod.get(key) for key in ("metadata", "status")}) for pod in pods]
    pods = [pod for pod in pods if names.node_of(pod) is not None]
    conditions = {str(each.get("type")): each for each in status.get("conditions") or [] if _true(each)}
    attempt = _attempts(kind, status, pods)
    if _SUCCEEDED.get(kind, "Succeeded") in conditions:
        native = _SUCCEEDED.get(kind, "Succeeded")
        return Status(state=State.SUCCEEDED, exit_code=0, attempt=attempt, native_state=native)
    if _FAILED in conditions:
        if kind == "Job" and not _cut_short(conditions[_FAILED], status, pods):
            attempt = max(0, attempt - 1)  # what has failed is counted, and nothing came after the last
        return _failed(workload, conditions[_FAILED], pods, attempt)
    if (workload.get("metadata") or {}).get("deletionTimestamp"):
        running = any(_running(pod) for pod in pods)
        state = State.RUNNING if running else State.QUEUED
        return Status(state=state, attempt=attempt, message="it is being deleted", native_state="Deleting")
    if "Suspended" in conditions or _suspended(workload):
        return _held(workload, attempt)
    return _going(workload, conditions, pods, events, attempt)


def _failed(workload: Object, condition: Object, pods: Sequence[Object], attempt: int) -> Status:
    said, word, ends = str(condition.get("message") or ""), str(condition.get("reason")), _ends(pods)
    if word == jobset.FAILED_FOR_GOOD:
        word = jobset.why_for_good(workload, (end.code for end in ends))
    reason, message = reasons.JOB.get(word, (Reason.EXIT_CODE, ""))
    for words, meaning in reasons.SAID_OF_JOB:
        if words in said:
            reason, message = meaning
    end = min(ends, key=lambda each: each.order, default=None)
    code = end.code if end is not None else None
    if reason is Reason.TIME_LIMIT:
        code = None
    elif end is not None and not (reason is Reason.SETUP and end.reason is Reason.EXIT_CODE):
        reason, message = end.reason, str(end)
    elif end is not None:
        message = _joined(message, end.message)
    return Status(
        state=State.FAILED,
        reason=reason,
        exit_code=code or None,
        attempt=attempt,
        message=_line(message or said),
        native_state=_native("Failed", condition.get("reason")),
    )


def _going(
    workload: Object, conditions: Mapping[str, Object], pods: Sequence[Object], events: Sequence[Object], attempt: int
) -> Status:
    """Of a job that is neither over nor held back."""
    alive = [pod for pod in pods if not _over(pod)]
    running = [pod for pod in alive if _running(pod)]
    wanted = wanted_pods(workload)
    reason, message = _obstacle(alive, events, seen=bool(pods))
    native = next((name for name in ("Restarting", "Running", "Created") if name in conditions), "")
    unheard = next((pod for pod in sorted(running, key=_node) if _unheard(pod, events)), None)
    if unheard is not None:
        return Status(
            state=State.RUNNING, reason=Reason.NODE_FAILURE, attempt=attempt, native_state=native or "Running",
            message=f"node {_node(unheard)}: its node does not answer",
        )  # fmt: skip
    if running or (not pods and "Running" in conditions):
        if wanted is not None and 0 < len(running) < wanted and message:
            return Status(
                state=State.RUNNING, reason=reason, attempt=attempt, native_state=native or "Running",
                message=_line(f"{len(running)} of {wanted} pods run; {message}"),
            )  # fmt: skip
        return Status(state=State.RUNNING, attempt=attempt, native_state=native or "Running")
    if reason is Reason.NONE and not message:
        ended = [pod for pod in pods if _over(pod)]
        end = min(_ends(ended), key=lambda each: each.order, default=None)
        if end is not None and attempt:
            reason, message = end.reason, f"it is started again: {end}"
        elif any(_phase(pod) == "Succeeded" for pod in ended):
            return Status(state=State.RUNNING, attempt=attempt, message="it is ending", native_state=native)
    return Status(
        state=State.QUEUED, reason=reason, attempt=attempt, message=_line(message), native_state=native or "Pending"
    )


def _held(workload: Object, attempt: int) -> Status:
    queue = ((workload.get("metadata") or {}).get("labels") or {}).get(names.KUEUE_QUEUE)
    if queue:
        reason, message = Reason.NO_CAPACITY, f"it waits for its turn in queue {queue}"
    else:
        reason, message = Reason.USER, "it is suspended; it goes on when its spec no longer says so"
    return Status(state=State.QUEUED, reason=reason, attempt=attempt, message=message, native_state="Suspended")


def _obstacle(pods: Sequence[Object], events: Sequence[Object], *, seen: bool) -> Meaning:
    """What keeps pods from running; the gravest of what there is, of the lowest node."""
    found = [
        (reason, f"node {_node(pod)}: {what}") for pod in sorted(pods, key=_node) for reason, what in waits(pod, events)
    ]
    if not seen or not found:
        found += _refusals(events, {_name(pod) for pod in pods})
    grave = [each for each in found if each[0] is Reason.SETUP]
    return next(iter(grave or found), (Reason.NONE, ""))


def waits(pod: Object, events: Sequence[Object]) -> Iterable[Meaning]:
    """What keeps this pod from running. `events` may be those of others too."""
    status = pod.get("status") or {}
    lost = _pod_reason(pod)
    if lost is not None:
        yield lost
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            held = condition.get("reason") == "SchedulingGated"
            what = "a scheduling gate holds it" if held else "no node fits"
            yield Reason.NO_CAPACITY, _joined(what, "" if held else condition.get("message"))
    for container in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        waiting = (container.get("state") or {}).get("waiting")
        if not waiting or _running(pod):
            continue
        word = str(waiting.get("reason") or "")
        reason, what = reasons.WAITING.get(word, (Reason.SETUP, word))
        if reason is Reason.NONE:
            continue
        end = _last_end(container, pod)
        if word == "CrashLoopBackOff" and end is not None:
            reason, what = end.reason, _joined(what, end.message)
        else:
            # A Secret, ConfigMap or key that is absent has nothing to do with the image.
            image = "" if word == "CreateContainerConfigError" else str(container.get("image") or "")
            what = _joined(what, _advised(str(waiting.get("message") or ""), image))
        yield reason, what
    if status.get("phase") == "Pending" and not _running(pod):
        # A pod that is scheduled and waits for volumes or a sandbox says so in its events alone.
        for event in _newest(events):
            if _about(event, "Pod") == _name(pod) and event.get("reason") in reasons.POD_EVENTS:
                if event.get("reason") == "FailedScheduling":
                    continue
                reason, what = reasons.POD_EVENTS[str(event["reason"])]
                yield reason, _joined(what, event.get("message"))
                break


def _refusals(events: Sequence[Object], pods: set[str]) -> Iterable[Meaning]:
    """What keeps pods from being made: said in events of the objects that make them."""
    for event in _newest(events):
        if event.get("type") != "Warning" or not str(event.get("reason", "")).startswith("FailedCreate"):
            continue
        if _about(event, "Pod") in pods:
            continue
        said = str(event.get("message") or "")
        for words, (reason, what) in reasons.EVENTS:
            if words in said:
                yield reason, _joined(what, said)
                return
        reason, what = reasons.POD_EVENTS.get(str(event["reason"]), (Reason.SETUP, "its pods cannot be made"))
        yield reason, _joined(what, said)
        return


def _ends(pods: Sequence[Object]) -> list[_End]:
    """How the pods that failed did; one for each."""
    found = []
    for pod in pods:
        status = pod.get("status") or {}
        words = _pod_reason(pod)
        ends = [end for end in (_last_end(each, pod) for each in _containers(status)) if end is not None]
        first = min(ends, key=lambda each: each.order, default=None)
        if words is not None:
            reason, what = words
            when, code = (first.when, first.code) if first else (str(status.get("startTime") or ""), 0)
            what = _joined(what, status.get("message") or _disruption(pod).get("message"))
            who = f"node {_node(pod)}"
            found.append(_End(who=who, node=_node(pod), when=when, code=code, reason=reason, message=what, grade=0))
        elif first is not None:
            found.append(first)
    return found


def _last_end(container: Object, pod: Object) -> _End | None:
    """How a container ended that failed; of one that runs again, how it did before."""
    for key in ("state", "lastState"):
        ended = (container.get(key) or {}).get("terminated")
        if not ended or not ended.get("exitCode"):
            continue
        word, code = str(ended.get("reason") or ""), int(ended["exitCode"])
        name = str(container.get("name"))
        reason, what = reasons.TERMINATED.get(word, (Reason.EXIT_CODE, ""))
        text = str(ended.get("message") or "")
        said, node, when = reports.last_line(text), _node(pod), str(ended.get("finishedAt") or "")
        who, grade = f"node {node}", 2 if reason is Reason.EXIT_CODE else 0
        report = reports.read(text) if name in names.MAIN else None
        if name not in names.MAIN:
            reason = Reason.SETUP
            what = "the code could not be brought" if name.startswith("accel-") else f"container {name} failed"
        elif report is not None and reason is Reason.EXIT_CODE:
            reason, said, who, grade = report.reason, report.message, report.who, 1
        elif report is not None:
            said = report.message
        message = _joined(what or ("" if said else f"exit code {code}"), said)
        return _End(who=who, node=node, when=when, code=code, reason=reason, message=message, grade=grade)
    return None


def _pod_reason(pod: Object) -> Meaning | None:
    status = pod.get("status") or {}
    if status.get("reason") in reasons.POD:
        return reasons.POD[str(status["reason"])]
    return reasons.DISRUPTED.get(str(_disruption(pod).get("reason")))


def _disruption(pod: Object) -> Object:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return next((each for each in conditions if each.get("type") == "DisruptionTarget" and _true(each)), {})


def _attempts(kind: str, status: Object, pods: Sequence[Object]) -> int:
    """How often the job was started again."""
    if kind == "JobSet":
        return int(status.get("restarts") or 0)
    if kind == "PyTorchJob":
        counts = [int(each.get("restartCount") or 0) for pod in pods for each in _containers(pod.get("status") or {})]
        return max(counts, default=0)
    failures: dict[int, int] = {}
    for pod in pods:
        if _phase(pod) == "Failed":
            failures[_node(pod)] = failures.get(_node(pod), 0) + 1
        label = ((pod.get("metadata") or {}).get("labels") or {}).get(names.RESTART_ATTEMPT, "")
        if kind == "TrainJob":
            failures[_node(pod)] = int(label) if label.isdigit() else 0
    return max(failures.values(), default=0)


def _cut_short(failed: Object, status: Object, pods: Sequence[Object]) -> bool:
    """Whether the last attempt's pods were deleted as its time was over: the Job counts them, and they are gone."""
    known = sum(_phase(pod) == "Failed" for pod in pods)
    return failed.get("reason") == "DeadlineExceeded" and int(status.get("failed") or 0) > known


def wanted_pods(workload: Object) -> int | None:
    """With how many pods the job starts; None where its object leaves that to another one."""
    spec = workload.get("spec") or {}
    kind = workload.get("kind")
    if kind == "PyTorchJob":
        counts = [int(each.get("replicas") or 1) for each in (spec.get("pytorchReplicaSpecs") or {}).values()]
        least = (spec.get("elasticPolicy") or {}).get("minReplicas")
        return int(least) if least else sum(counts)
    if kind == "Job":
        return int(spec.get("completions") or 1)
    if kind == "JobSet":
        jobs = [each.get("template", {}).get("spec", {}) for each in spec.get("replicatedJobs") or []]
        return sum(int(each.get("completions") or 1) for each in jobs)
    nodes = (spec.get("trainer") or {}).get("numNodes")
    return int(nodes) if nodes else None


def _suspended(workload: Object) -> bool:
    spec = workload.get("spec") or {}
    return bool(spec.get("suspend") or (spec.get("runPolicy") or {}).get("suspend"))


def _running(pod: Object) -> bool:
    if (pod.get("metadata") or {}).get("deletionTimestamp") and _disruption(pod):
        return False
    for each in (pod.get("status") or {}).get("containerStatuses") or []:
        if each.get("name") in names.MAIN and (each.get("state") or {}).get("running"):
            return True
    return False


def not_ready(pod: Object) -> bool:
    """Whether a pod that runs is said not to be ready: its node may be lost, which its warnings say."""
    conditions = (pod.get("status") or {}).get("conditions") or []
    return _running(pod) and any(each.get("type") == "Ready" and not _true(each) for each in conditions)


def _unheard(pod: Object, events: Sequence[Object]) -> bool:
    """Whether nothing has been heard of its node since it ran."""
    return not_ready(pod) and any(
        event.get("reason") == "NodeNotReady" and _about(event, "Pod") == _name(pod) for event in events
    )


def _over(pod: Object) -> bool:
    return _phase(pod) in ("Succeeded", "Failed")


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase") or "Pending")


def _containers(status: Object) -> list[Object]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _node(pod: Object) -> int:
    found = names.node_of(pod)
    return 0 if found is None else found


def _name(pod: Object) -> str:
    return str((pod.get("metadata") or {}).get("name"))


def _about(event: Object, kind: str) -> str | None:
    """The name of the object of that kind that the event is about, in either API of events."""
    about = event.get("involvedObject") or event.get("regarding") or {}
    return str(about.get("name")) if about.get("kind") == kind else None


def _newest(events: Sequence[Object]) -> list[Object]:
    def when(event: Object) -> str:
        series = event.get("series") or {}
        return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")

    plain = [{**event, "message": event.get("message") or event.get("note")} for event in events]
    return sorted(plain, key=when, reverse=True)


def _advised(said: str, image: str) -> str:
    for words, advice in reasons.ADVICE:
        if words in said:
            return advice
    return said if image in said else f"{image} ({said})" if said else image


def _without_nulls(value: Any) -> Any:
    """The same without what is null: some clients keep it, and it means that nothing is said."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(inside) for key, inside in value.items() if inside is not None}
    return [_without_nulls(inside) for inside in value if inside is not None] if isinstance(value, list) else value


def _true(condition: Object) -> bool:
    return condition.get("status") == "True"


def _native(state: str, reason: Any) -> str:
    return f"{state}: {reason}" if reason else state


def _joined(what: str, said: Any) -> str:
    text = str(said or "").strip()
    return f"{what}: {text}" if what and text else what or text


def _line(text: str) -> str:
    one = " ".join(text.split())
    return one if len(one) <= _LONGEST else f"{one[: _LONGEST - 1]}…"
