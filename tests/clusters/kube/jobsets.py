"""Doubles of the controllers of JobSet (0.8 on) and of Kubeflow Trainer v2: what makes Jobs, and what makes JobSets.

https://jobset.sigs.k8s.io/docs/ and https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

from .client import Object, Refused
from .controllers import SERVICE, Controller, condition, going, merged, set_condition
from .watch import seconds

JOB, INDEX = "/apis/batch/v1/jobs", "batch.kubernetes.io/job-completion-index"
JOBSET = "/apis/jobset.x-k8s.io/v1alpha2/jobsets"
_LABEL = "jobset.sigs.k8s.io"
_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_PORT = 29500


class JobSets(Controller):
    path = JOBSET
    kind = "JobSet"
    name = "jobset-controller"
    owns = (JOB, SERVICE)

    async def reconcile(self, item: Object, status: Object) -> float | None:
        spec, jobs = item["spec"], self.owned(item, JOB)
        restarts = status.get("restarts", 0)
        mine = [job for job in jobs if int(job["metadata"]["labels"][f"{_LABEL}/restart-attempt"]) == restarts]
        old = [job for job in jobs if job not in mine]
        _tell_jobs(spec, status, mine)
        if condition(status, "Completed") or condition(status, "Failed"):
            for job in going([*old, *(each for each in mine if not _finished(each))]):
                await self.cluster.delete(JOB, job, "Foreground")
            return await expire(self, item, status, ("Completed", "Failed"))
        for job in going(old):
            await self.cluster.delete(JOB, job, "Foreground")
        failed = next((job for job in mine if _condition(job, "Failed")), None)
        if failed is not None:
            self._fail(item, status, failed)
            return 0
        if mine and len(mine) == _count(spec) and all(_condition(job, "Complete") for job in mine):
            set_condition(status, "Completed", "AllJobsCompleted", "jobset completed successfully")
            status["terminalState"] = "Completed"
            self.events.tell(item, "AllJobsCompleted", "jobset completed successfully")
            return 0
        await self._supply(item, restarts, mine, waits=bool(old))
        await self._hold(item, status, mine)
        return None

    def _fail(self, item: Object, status: Object, job: Object) -> None:
        """A Job of this attempt has failed: all begin anew, or that was it."""
        policy, restarts = item["spec"].get("failurePolicy"), status.get("restarts", 0)
        first = f"(first failed job: {job['metadata']['name']})"
        action = _action(policy, job) if policy is not None else ""
        if action == "RestartJobSet" and restarts < policy.get("maxRestarts", 0):
            status["restarts"] = status["restartsCountTowardsMax"] = restarts + 1
            said = f"applying RestartJobSet failure policy action {first}"
            self.events.tell(item, "RestartJobSetFailurePolicyAction", said, warning=True)
            return
        reason, said = {
            "": ("FailedJobs", "jobset failed due to one or more job failures"),
            "FailJobSet": ("FailJobSetFailurePolicyAction", "applying FailJobSet failure policy action"),
            "RestartJobSet": ("ReachedMaxRestarts", "jobset failed due to reaching max number of restarts"),
        }[action]
        set_condition(status, "Failed", reason, f"{said} {first}")
        status["terminalState"] = "Failed"
        self.events.tell(item, reason, f"{said} {first}", warning=True)

    async def _supply(self, item: Object, restarts: int, mine: Sequence[Object], *, waits: bool) -> None:
        spec, name = item["spec"], item["metadata"]["name"]
        network = spec.get("network") or {}
        there = {job["metadata"]["name"] for job in mine}
        if network.get("enableDNSHostnames", True) and not self.owned(item, SERVICE):
            await self.create(item, SERVICE, _service(name, network))
        blocks = (spec.get("failurePolicy") or {}).get("restartStrategy") == "BlockingRecreate"
        if waits and blocks:
            return
        for replicated in spec.get("replicatedJobs") or []:
            for index in range(replicated.get("replicas", 1)):
                called = f"{name}-{replicated['name']}-{index}"
                # Of the same name as the last attempt's, which may still be ending: then it is tried again.
                if called not in there and not self._exists(item, called):
                    await self.create(item, JOB, _job(item, replicated, index, called, restarts, network))

    def _exists(self, item: Object, name: str) -> bool:
        return any(job["metadata"]["name"] == name for job in self.owned(item, JOB))

    async def _hold(self, item: Object, status: Object, mine: Sequence[Object]) -> None:
        held = bool(item["spec"].get("suspend"))
        for job in going(mine):
            if bool(job["spec"].get("suspend")) != held and not _finished(job):
                await self.cluster.patch(JOB, job, {"spec": {"suspend": held}})
        if held:
            set_condition(status, "Suspended", "SuspendedJobs", "jobset is suspended")
        elif condition(status, "Suspended"):
            set_condition(status, "Suspended", "ResumeJobs", "jobset is resumed", true=False)


class TrainJobs(Controller):
    path = f"{_TRAINER}/trainjobs"
    kind = "TrainJob"
    name = "trainjob-controller"
    owns = (JOBSET,)

    async def reconcile(self, item: Object, status: Object) -> float | None:
        sets = self.owned(item, JOBSET)
        if condition(status, "Complete") or condition(status, "Failed"):
            return None
        deadline = item["spec"].get("activeDeadlineSeconds")
        left = None if deadline is None else seconds(item["metadata"]["creationTimestamp"]) + deadline - time.time()
        if left is not None and left <= 0:
            for each in going(sets):
                await self.cluster.delete(JOBSET, each, "Foreground")
            set_condition(status, "Failed", "DeadlineExceeded", "TrainJob was active longer than specified deadline")
            return None
        if not sets:
            runtime = await self._runtime(item, status)
            if runtime is not None:
                await self.create(item, JOBSET, _jobset(item, runtime))
        for each in going(sets):
            await self._follow(item, status, each)
        return left

    async def _runtime(self, item: Object, status: Object) -> Object | None:
        reference, place = item["spec"]["runtimeRef"], item["metadata"]["namespace"]
        try:
            path = f"{_TRAINER}/namespaces/{place}/trainingruntimes/{reference['name']}"
            return await self.cluster.connection.call("GET", path)
        except Refused:
            said = f"TrainingRuntime {reference['name']} is not found"
            set_condition(status, "Failed", "TrainingRuntimeNotSupported", said)
            return None

    async def _follow(self, item: Object, status: Object, made: Object) -> None:
        held = bool(item["spec"].get("suspend"))
        if bool(made["spec"].get("suspend")) != held:
            await self.cluster.patch(JOBSET, made, {"spec": {"suspend": held}})
        if held:
            set_condition(status, "Suspended", "Suspended", "TrainJob is suspended")
        elif condition(status, "Suspended"):
            set_condition(status, "Suspended", "Resumed", "TrainJob is resumed", true=False)
        told = made.get("status") or {}
        if told.get("replicatedJobsStatus"):
            status["jobsStatus"] = told["replicatedJobsStatus"]
        for theirs, ours in (("Completed", "Complete"), ("Failed", "Failed")):
            found = condition(told, theirs)
            if found is not None:
                set_condition(status, ours, found["reason"], found["message"])


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


def _action(policy: Object, job: Object) -> str:
    """Of the first rule that the failed Job meets."""
    failed = condition(job["status"], "Failed") or {}
    for rule in policy.get("rules") or []:
        if failed.get("reason") in rule.get("onJobFailureReasons", [failed.get("reason")]):
            return str(rule["action"])
    return "RestartJobSet"


def _job(item: Object, replicated: Object, index: int, called: str, restarts: int, network: Object) -> Object:
    name, template = item["metadata"]["name"], copy.deepcopy(replicated["template"])
    spec, metadata = template["spec"], template.get("metadata") or {}
    own = {
        f"{_LABEL}/jobset-name": name, f"{_LABEL}/replicatedjob-name": replicated["name"],
        f"{_LABEL}/replicatedjob-replicas": str(replicated.get("replicas", 1)), f"{_LABEL}/job-index": str(index),
        f"{_LABEL}/restart-attempt": str(restarts), f"{_LABEL}/jobset-uid": item["metadata"]["uid"],
    }  # fmt: skip
    pods = spec["template"].setdefault("metadata", {})
    for place in (metadata, pods):
        place["labels"] = merged(place.get("labels"), own)
        place["annotations"] = merged(place.get("annotations"), own)
    if network.get("enableDNSHostnames", True):
        spec["template"]["spec"]["subdomain"] = network.get("subdomain") or name
    spec["completionMode"] = "Indexed"
    if item["spec"].get("suspend"):
        spec["suspend"] = True
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {**metadata, "name": called}, "spec": spec}


def _service(name: str, network: Object) -> Object:
    spec = {
        "clusterIP": "None", "selector": {f"{_LABEL}/jobset-name": name},
        "publishNotReadyAddresses": network.get("publishNotReadyAddresses", True),
    }  # fmt: skip
    metadata = {"name": network.get("subdomain") or name}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _jobset(item: Object, runtime: Object) -> Object:
    """What the TrainJob says, put into what its runtime says."""
    name, template = item["metadata"]["name"], copy.deepcopy(runtime["spec"]["template"])
    trainer, spec = item["spec"].get("trainer") or {}, template["spec"]
    nodes = trainer.get("numNodes") or (runtime["spec"].get("mlPolicy") or {}).get("numNodes", 1)
    for replicated in spec["replicatedJobs"]:
        labels = (replicated["template"].get("metadata") or {}).get("labels") or {}
        if labels.get(_STEP) != "trainer":
            continue
        job = replicated["template"]["spec"]
        job |= {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed"}
        for container in job["template"]["spec"]["containers"]:
            if container["name"] == "node":
                _instruct(container, trainer, f"{name}-{replicated['name']}-0-0.{name}", nodes)
    if item["spec"].get("suspend"):
        spec["suspend"] = True
    metadata = {**(template.get("metadata") or {}), "name": name}
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def _instruct(container: Object, trainer: Object, master: str, nodes: int) -> None:
    for key in ("image", "command", "args"):
        if trainer.get(key):
            container[key] = trainer[key]
    if trainer.get("resourcesPerNode"):
        container["resources"] = trainer["resourcesPerNode"]
    rank = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    told = [
        {"name": "PET_NNODES", "value": str(nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer.get("numProcPerNode", "auto"))},
        {"name": "PET_NODE_RANK", "valueFrom": rank},
        {"name": "PET_MASTER_ADDR", "value": master},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    container["env"] = [*(container.get("env") or []), *(trainer.get("env") or []), *told]
    container["ports"] = [*(container.get("ports") or []), {"containerPort": _PORT}]


def _tell_jobs(spec: Object, status: Object, jobs: Sequence[Object]) -> None:
    told: list[Object] = []
    for replicated in spec.get("replicatedJobs") or []:
        key, name = f"{_LABEL}/replicatedjob-name", replicated["name"]
        mine = [job for job in jobs if job["metadata"]["labels"].get(key) == name]
        running = [job for job in mine if (job.get("status") or {}).get("active")]
        all_ready = [job for job in running if job["status"].get("ready") == job["spec"].get("parallelism", 1)]
        counts = {"active": len(running), "ready": len(all_ready)}
        for word, kind in (("succeeded", "Complete"), ("failed", "Failed"), ("suspended", "Suspended")):
            counts[word] = sum(_condition(job, kind) for job in mine)
        told.append({"name": name, **counts})
    status["replicatedJobsStatus"] = told
    status.setdefault("restarts", 0)


def _count(spec: Object) -> int:
    return sum(each.get("replicas", 1) for each in spec.get("replicatedJobs") or [])


def _condition(item: Object, kind: str) -> bool:
    return condition(item.get("status") or {}, kind) is not None


def _finished(job: Object) -> bool:
    return _condition(job, "Complete") or _condition(job, "Failed")
