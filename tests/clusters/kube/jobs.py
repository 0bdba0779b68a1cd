"""A double of Kubernetes' Job controller, as of 1.31 on: Indexed Jobs and plain ones.

Of 1.20 no Job can be Indexed or suspended. https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Iterator, Sequence

from .client import Object
from .controllers import (
    POD,
    Cluster,
    Controller,
    condition,
    exit_codes,
    going,
    merged,
    phase,
    ready,
    set_condition,
)
from .watch import seconds, stamp

JOB = "/apis/batch/v1/jobs"
INDEX = "batch.kubernetes.io/job-completion-index"
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
# 10 seconds otherwise, and twice as long each time.
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 3.0


class Jobs(Controller):
    path = JOB
    kind = "Job"
    name = "job-controller"

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self._failed: dict[str, dict[str, float]] = {}  # of each Job, its pods that failed, and when that was seen

    def consider(self, kind: str, item: Object) -> None:
        uid = item["metadata"]["uid"]
        if kind == "DELETED" and item.get("kind") == self.kind:
            self._failed.pop(uid, None)
        elif kind == "DELETED":
            # One that was taken away while it ran has failed too.
            for owner in item["metadata"].get("ownerReferences") or []:
                if owner["kind"] == self.kind and phase(item) != "Succeeded":
                    self._failed.setdefault(owner["uid"], {}).setdefault(uid, time.time())
        super().consider(kind, item)

    async def reconcile(self, item: Object, status: Object) -> float | None:
        spec, pods = item["spec"], self.owned(item)
        if condition(status, "Complete") or condition(status, "Failed"):
            return await expire(self, item, status, ("Complete", "Failed"))
        failed = self._failed.setdefault(item["metadata"]["uid"], {})
        for pod in pods:
            if phase(pod) == "Failed":
                failed.setdefault(pod["metadata"]["uid"], time.time())
        active = [pod for pod in pods if phase(pod) not in ("Succeeded", "Failed")]
        again = None
        if condition(status, "FailureTarget") is None and spec.get("suspend"):
            await self._suspend(status, active)
        elif condition(status, "FailureTarget") is None:
            _resume(status)
            why = _failure(item, status, pods, failed)
            if why is not None:
                set_condition(status, "FailureTarget", *why)
                self.events.tell(item, *why, warning=True)
            else:
                again = await self._supply(item, status, pods, active, failed)
        if condition(status, "FailureTarget") is not None:
            await self._end(status, active)
        _count(item, status, pods, failed)
        return again

    async def _suspend(self, status: Object, active: Sequence[Object]) -> None:
        for pod in going(active):
            await self.cluster.delete(POD, pod)
        status.pop("startTime", None)
        set_condition(status, "Suspended", "JobSuspended", "Job suspended")

    async def _end(self, status: Object, active: Sequence[Object]) -> None:
        for pod in going(active):
            await self.cluster.delete(POD, pod)
        why = condition(status, "FailureTarget")
        if not active and why is not None:
            set_condition(status, "Failed", why["reason"], why["message"])

    async def _supply(
        self, item: Object, status: Object, pods: Sequence[Object], active: Sequence[Object], failed: dict[str, float]
    ) -> float | None:
        """Makes the pods that are wanting; says when to look again."""
        spec = item["spec"]
        succeeded = [pod for pod in pods if phase(pod) == "Succeeded"]
        indexed = spec.get("completionMode") == "Indexed"
        parallelism = spec.get("parallelism", 1)
        wanted = spec.get("completions", parallelism if indexed else 1)
        done = {_index(pod) for pod in succeeded} if indexed else set(range(len(succeeded)))
        if len(done) >= wanted and not active:
            set_condition(status, "SuccessCriteriaMet", "CompletionsReached", _REACHED)
            set_condition(status, "Complete", "CompletionsReached", _REACHED)
            status["completionTime"] = stamp()
            self.events.tell(item, "Completed", "Job completed")
            return None
        again = _deadline(spec, status)
        pause = min(_BACKOFF_S * 2 ** (len(failed) - 1), _LONGEST_BACKOFF_S) if failed else 0
        left = max(failed.values(), default=0) + pause - time.time()
        if left > 0:
            return left if again is None else min(left, again)
        busy = {_index(pod) for pod in active} if indexed else set(range(wanted - len(active), wanted))
        for index in [index for index in range(wanted) if index not in busy | done][: parallelism - len(active)]:
            pod = _pod(item, index if indexed else None)
            if await self.create(item, POD, pod):
                self.events.tell(item, "SuccessfulCreate", f"Created pod: {pod['metadata']['name']}")
        return again


_REACHED = "Reached expected number of succeeded pods"


async def expire(controller: Controller, item: Object, status: Object, ends: Sequence[str]) -> float | None:
    """Deletes the object, and all that is its own, so long after one of these conditions; says when to look again."""
    ttl = item["spec"].get("ttlSecondsAfterFinished")
    ended = next((found for kind in ends if (found := condition(status, kind)) is not None), None)
    if ttl is None or ended is None:
        return None
    left = seconds(ended["lastTransitionTime"]) + ttl - time.time()
    if left > 0:
        return float(left)
    await controller.cluster.delete(controller.path, item, "Foreground")
    return None


def _failure(item: Object, status: Object, pods: Sequence[Object], failed: dict[str, float]) -> tuple[str, str] | None:
    """Why the Job fails now: a reason and a message."""
    spec = item["spec"]
    for pod in pods:
        if phase(pod) == "Failed":
            matched = _matched(spec, pod)
            if matched:
                return "PodFailurePolicy", matched
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and time.time() - seconds(status["startTime"]) >= deadline:
        return "DeadlineExceeded", "Job was active longer than specified deadline"
    restarts = sum(
        each["restartCount"] for pod in pods for each in (pod.get("status") or {}).get("containerStatuses") or []
    )
    if len(failed) + restarts > spec.get("backoffLimit", 6):
        return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    return None


def _matched(spec: Object, pod: Object) -> str | None:
    """What is said of a pod that a rule of the failure policy names."""
    metadata = pod["metadata"]
    for number, rule in enumerate((spec.get("podFailurePolicy") or {}).get("rules") or []):
        codes = rule.get("onExitCodes")
        if rule["action"] != "FailJob" or not codes:
            continue
        for container, code in exit_codes(pod):
            if code == 0 or codes.get("containerName") not in (None, container):
                continue
            if (code in codes["values"]) == (codes["operator"] == "In"):
                where = f"{metadata['namespace']}/{metadata['name']}"
                said = f"Container {container} for pod {where} failed with exit code {code}"
                return f"{said} matching FailJob rule at index {number}"
    return None


def _deadline(spec: Object, status: Object) -> float | None:
    deadline = spec.get("activeDeadlineSeconds")
    return None if deadline is None else float(seconds(status["startTime"]) + deadline - time.time())


def _resume(status: Object) -> None:
    if condition(status, "Suspended"):
        set_condition(status, "Suspended", "JobResumed", "Job resumed", true=False)
    status.setdefault("startTime", stamp())


def _count(item: Object, status: Object, pods: Sequence[Object], failed: dict[str, float]) -> None:
    alive = [pod for pod in pods if phase(pod) not in ("Succeeded", "Failed")]
    done = [pod for pod in pods if phase(pod) == "Succeeded"]
    status["active"], status["terminating"] = len(going(alive)), len(alive) - len(going(alive))
    status["ready"], status["succeeded"] = sum(ready(pod) for pod in going(alive)), len(done)
    status["failed"] = len(failed)
    if item["spec"].get("completionMode") == "Indexed":
        status["completedIndexes"] = ",".join(_ranges(sorted({_index(pod) for pod in done})))


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """0, 1, 2, 5 as `0-2`, `5`; two in a row as two."""
    at = 0
    while at < len(numbers):
        end = at
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        if end - at >= 2:
            yield f"{numbers[at]}-{numbers[end]}"
        else:
            yield from map(str, numbers[at : end + 1])
        at = end + 1


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _pod(job: Object, index: int | None) -> Object:
    name, uid = job["metadata"]["name"], job["metadata"]["uid"]
    template = job["spec"]["template"]
    inside, metadata = copy.deepcopy(template["spec"]), template.get("metadata") or {}
    own = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name}
    own |= {"controller-uid": uid, "job-name": name}
    tail = "".join(secrets.choice(_ALPHABET) for _ in range(5))
    notes = merged(metadata.get("annotations"))
    if index is not None:
        own[INDEX] = notes[INDEX] = str(index)
        inside.setdefault("hostname", f"{name}-{index}")
        field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
        for container in (*(inside.get("initContainers") or []), *inside["containers"]):
            there = container.get("env") or []
            if all(each["name"] != "JOB_COMPLETION_INDEX" for each in there):
                container["env"] = [*there, {"name": "JOB_COMPLETION_INDEX", "valueFrom": field}]
        tail = f"{index}-{tail}"
    made = {"name": f"{name}-{tail}", "labels": merged(metadata.get("labels"), own), "annotations": notes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": inside}
