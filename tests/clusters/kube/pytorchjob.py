"""A double of Kubeflow's training operator, 1.9, for PyTorchJobs: names, labels, environment, states, deletions.

What it does was read in https://github.com/kubeflow/trainer/tree/release-1.9/pkg/controller.v1. It adds no init
container: the nodes of the tests find a master's name as soon as it is there.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence

from .client import Object
from .controllers import POD, SERVICE, Controller, condition, exit_codes, going, merged, phase
from .watch import seconds, stamp

_LABEL = "training.kubeflow.org"
_PORT_NAME, _PORT = "pytorchjob-port", 23456
_MANAGER = "kubeflow.org/training-operator"
_UNKNOWN_CODE = 0xBEEF


class PyTorchJobs(Controller):
    path = "/apis/kubeflow.org/v1/pytorchjobs"
    kind = "PyTorchJob"
    name = "pytorchjob-controller"
    owns = (POD, SERVICE)

    async def reconcile(self, item: Object, status: Object) -> float | None:
        spec = _with_defaults(item["spec"])
        policy, name = spec["runPolicy"], item["metadata"]["name"]
        if policy.get("managedBy") not in (None, _MANAGER):
            return None
        pods = self.owned(item)
        if not status.get("conditions"):
            _tell(status, "Created", f"PyTorchJob {name} is created.")
        if _finished(status):
            return await self._clean(item, spec, status, pods)
        if policy.get("suspend"):
            await self._wipe(pods, "All")
            _suspend(status, name)
            return None
        if condition(status, "Suspended"):
            _tell(status, "Suspended", f"PyTorchJob {name} is resumed.", true=False, reason="PyTorchJobResumed")
            status["startTime"] = stamp()
        why, again = _over_its_limits(spec, status, pods, name)
        if why:
            status.setdefault("completionTime", stamp())
            await self._wipe(pods, "All")  # whatever its cleanPodPolicy: it has not finished yet
            _tell(status, "Failed", why)
            self.events.tell(item, "PyTorchJobFailed", why)
            return None
        status.setdefault("startTime", stamp())
        counts = {}
        for role, replica in spec["pytorchReplicaSpecs"].items():
            counts[role] = await self._replicas(item, spec, status, role, replica, pods)
        _judge(spec, status, counts, name)
        return again

    async def _replicas(
        self, item: Object, spec: Object, status: Object, role: str, replica: Object, pods: Sequence[Object]
    ) -> dict[str, int]:
        """Makes those that are not there, and counts the others."""
        name, kind = item["metadata"]["name"], role.lower()
        own = {f"{_LABEL}/operator-name": self.name, f"{_LABEL}/job-name": name, f"{_LABEL}/replica-type": kind}
        selector = ",".join(f"{key}={value}" for key, value in sorted(own.items()))
        count = {"active": 0, "succeeded": 0, "failed": 0}
        there = {each["metadata"]["name"]: each for each in pods}
        services = {each["metadata"]["name"] for each in self.owned(item, SERVICE)}
        for index in range(replica["replicas"]):
            called, labels = f"{name}-{kind}-{index}", {**own, f"{_LABEL}/replica-index": str(index)}
            pod = there.get(called)
            if pod is None:
                body = _pod(spec, name, role, index, replica, called, labels)
                await self.create(item, POD, body)
            else:
                await self._count(pod, replica, role, status, name, count)
            if called not in services:
                await self.create(item, SERVICE, _service(called, labels, replica))
        told = {key: value for key, value in count.items() if value}
        status.setdefault("replicaStatuses", {})[role] = {**told, "selector": selector}
        return count

    async def _count(
        self, pod: Object, replica: Object, role: str, status: Object, name: str, count: dict[str, int]
    ) -> None:
        policy, where = replica["restartPolicy"], phase(pod)
        if where == "Failed":
            code = next((code for container, code in exit_codes(pod) if container == "pytorch"), _UNKNOWN_CODE)
            if policy in ("OnFailure", "Always") or (policy == "ExitCode" and code >= 128):
                await self.cluster.delete(POD, pod)
                _tell(status, "Restarting", f"PyTorchJob {name} is restarting because {role} replica(s) failed.")
            elif policy == "ExitCode":
                _tell(status, "Failed", f"job '{name}' is failing because '{role}' replica(s) failed.")
        if where == "Running" and not going([pod]):
            return
        key = {"Running": "active", "Succeeded": "succeeded", "Failed": "failed"}.get(where)
        if key is not None:
            count[key] += 1

    async def _clean(self, item: Object, spec: Object, status: Object, pods: Sequence[Object]) -> float | None:
        policy = spec["runPolicy"]
        await self._wipe(pods, policy["cleanPodPolicy"])
        if condition(status, "Succeeded"):
            for told in (status.get("replicaStatuses") or {}).values():
                told["succeeded"] = told.get("succeeded", 0) + told.pop("active", 0)
        ttl = policy.get("ttlSecondsAfterFinished")
        if ttl is None or "completionTime" not in status:
            return None
        left = seconds(status["completionTime"]) + ttl - time.time()
        if left <= 0:
            await self.cluster.delete(self.path, item)
            return None
        return float(left)

    async def _wipe(self, pods: Sequence[Object], policy: str) -> None:
        """Pods, and the Services of the same names, as a `cleanPodPolicy` says."""
        if policy == "None":
            return
        services = {each["metadata"]["name"]: each for pod in pods for each in self.cluster.listings[SERVICE]
                    if each["metadata"]["name"] == pod["metadata"]["name"]
                    and each["metadata"]["namespace"] == pod["metadata"]["namespace"]}  # fmt: skip
        for pod in going(pods):
            if policy == "Running" and phase(pod) not in ("Running", "Pending"):
                continue
            await self.cluster.delete(POD, pod)
            service = services.get(pod["metadata"]["name"])
            if service is not None:
                await self.cluster.delete(SERVICE, service)


def _with_defaults(spec: Object) -> Object:
    found = copy.deepcopy(spec)
    found.setdefault("runPolicy", {}).setdefault("cleanPodPolicy", "None")
    for replica in found["pytorchReplicaSpecs"].values():
        replica.setdefault("replicas", 1)
        replica.setdefault("restartPolicy", "OnFailure")
        for container in replica["template"]["spec"]["containers"]:
            ports = container.setdefault("ports", [])
            if container["name"] == "pytorch" and all(port.get("name") != _PORT_NAME for port in ports):
                ports.append({"name": _PORT_NAME, "containerPort": _PORT, "protocol": "TCP"})
    elastic = found.get("elasticPolicy")
    if elastic is not None:
        workers = found["pytorchReplicaSpecs"]["Worker"]["replicas"]
        elastic.setdefault("minReplicas", elastic.get("maxReplicas", workers))
        elastic.setdefault("maxReplicas", elastic["minReplicas"])
    if elastic is None or "nProcPerNode" not in elastic:
        found.setdefault("nprocPerNode", "auto")
    return found


def _pod(spec: Object, job: str, role: str, index: int, replica: Object, called: str, labels: dict[str, str]) -> Object:
    template = replica["template"]
    metadata, inside = template.get("metadata") or {}, copy.deepcopy(template["spec"])
    master = "Master" in spec["pytorchReplicaSpecs"]
    if role == "Master" or (not master and index == 0):
        labels = {**labels, f"{_LABEL}/job-role": "master"}
    for container in inside["containers"]:
        container["env"] = [*(container.get("env") or []), *_environment(spec, job, role, index)]
    policy = replica["restartPolicy"]
    inside["restartPolicy"] = "Never" if policy == "ExitCode" else policy
    own = {"name": called, "labels": merged(metadata.get("labels"), labels), "annotations": metadata.get("annotations")}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": inside}


def _service(called: str, labels: dict[str, str], replica: Object) -> Object:
    ports = [{"name": _PORT_NAME, "port": _port(replica)}]
    spec = {"clusterIP": "None", "selector": labels, "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": called, "labels": labels}, "spec": spec}


def _port(replica: Object) -> int:
    for container in replica["template"]["spec"]["containers"]:
        for port in container.get("ports") or []:
            if container["name"] == "pytorch" and port.get("name") == _PORT_NAME:
                return int(port["containerPort"])
    return _PORT


def _environment(spec: Object, job: str, role: str, index: int) -> Iterator[Object]:
    for key, value in _variables(spec, job, role, index):
        yield {"name": key, "value": str(value)}


def _variables(spec: Object, job: str, role: str, index: int) -> Iterator[tuple[str, object]]:
    replicas, elastic = spec["pytorchReplicaSpecs"], spec.get("elasticPolicy")
    total = sum(each["replicas"] for each in replicas.values())
    each_pod = spec.get("nprocPerNode")
    yield "PYTHONUNBUFFERED", 1
    if "Master" in replicas:
        rank = index + (1 if role == "Worker" else 0)
        for prefix in ("", "PET_"):
            yield f"{prefix}MASTER_PORT", _port(replicas["Master"])
            yield f"{prefix}MASTER_ADDR", f"{job}-master-0"
        yield "WORLD_SIZE", total * (int(each_pod) if each_pod is not None and str(each_pod).isdigit() else 1)
        yield "RANK", rank
        yield "PET_NODE_RANK", rank
    if each_pod is not None:
        yield "PET_NPROC_PER_NODE", each_pod
    if elastic is None:
        yield "PET_NNODES", total
        return
    host, port = elastic.get("rdzvHost", f"{job}-worker-0"), elastic.get("rdzvPort", _port(replicas["Worker"]))
    yield "PET_RDZV_ENDPOINT", f"{host}:{port}"
    yield "PET_RDZV_BACKEND", elastic.get("rdzvBackend", "c10d")
    yield "PET_NNODES", f"{elastic['minReplicas']}:{elastic['maxReplicas']}"
    for key, variable in (("maxRestarts", "MAX_RESTARTS"), ("nProcPerNode", "NPROC_PER_NODE"), ("rdzvId", "RDZV_ID")):
        if key in elastic:
            yield f"PET_{variable}", elastic[key]
    if elastic.get("rdzvConf"):
        yield "PET_RDZV_CONF", ",".join(f"{each['key']}={each['value']}" for each in elastic["rdzvConf"])


def _over_its_limits(spec: Object, status: Object, pods: Sequence[Object], name: str) -> tuple[str, float | None]:
    """Why the job fails now, if it does; and when to ask again."""
    policy = spec["runPolicy"]
    limit, deadline = policy.get("backoffLimit"), policy.get("activeDeadlineSeconds")
    if limit is not None:
        alive = [pod for pod in pods if phase(pod) not in ("Succeeded", "Failed") and going([pod])]
        failed = sum(phase(pod) == "Failed" for pod in pods)
        known = sum(each.get("failed", 0) for each in (status.get("replicaStatuses") or {}).values())
        total = sum(each["replicas"] for each in spec["pytorchReplicaSpecs"].values())
        fresh = failed > known and len(alive) != total and limit < 1
        restarts = sum(_restarts(spec, pod) for pod in pods)
        if fresh or (restarts >= limit if limit else restarts > 0):
            return f"Job {name} has failed because it has reached the specified backoff limit", None
    if deadline is not None and "startTime" in status:
        left = seconds(status["startTime"]) + deadline - time.time()
        if left <= 0:
            return f"Job {name} has failed because it was active longer than specified deadline", None
        return "", float(left)
    return "", float(deadline) if deadline is not None else None


def _restarts(spec: Object, pod: Object) -> int:
    """Of the containers of a running pod whose role is restarted at all."""
    role = pod["metadata"]["labels"].get(f"{_LABEL}/replica-type", "").capitalize()
    policy = (spec["pytorchReplicaSpecs"].get(role) or {}).get("restartPolicy")
    if phase(pod) != "Running" or policy not in ("OnFailure", "Always", "ExitCode"):
        return 0
    status = pod["status"]
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return sum(each["restartCount"] for each in containers)


def _judge(spec: Object, status: Object, counts: dict[str, dict[str, int]], name: str) -> None:
    """The job's state out of how many pods are where."""
    replicas = spec["pytorchReplicaSpecs"]
    for role, count in counts.items():
        wanted, policy = replicas[role]["replicas"], replicas[role]["restartPolicy"]
        if role == "Master" or "Master" not in replicas:
            any_will_do = role == "Worker" and spec.get("elasticPolicy") is not None
            if count["succeeded"] == wanted or (any_will_do and count["succeeded"]):
                status.setdefault("completionTime", stamp())
                _tell(status, "Succeeded", f"PyTorchJob {name} is successfully completed.")
            elif count["active"]:
                _tell(status, "Running", f"PyTorchJob {name} is running.")
        why = f"{count['failed']} {role} replica(s) failed."
        if count["failed"] and wanted > count["succeeded"] + count["active"]:
            if policy != "Never":
                _tell(status, "Restarting", f"PyTorchJob {name} is restarting because {why}")
            else:
                status.setdefault("completionTime", stamp())
                _tell(status, "Failed", f"PyTorchJob {name} is failed because {why}")


def _suspend(status: Object, name: str) -> None:
    for told in (status.get("replicaStatuses") or {}).values():
        told["active"] = 0
    said = f"PyTorchJob {name} is suspended."
    if condition(status, "Running"):
        _tell(status, "Running", said, true=False, reason="PyTorchJobSuspended")
    if not condition(status, "Suspended"):
        _tell(status, "Suspended", said)


def _tell(status: Object, kind: str, message: str, *, true: bool = True, reason: str | None = None) -> None:
    """Sets a condition. Running and Restarting take each other's place; what has failed stays so."""
    if condition(status, "Failed"):
        return
    said, reason = "True" if true else "False", reason or f"PyTorchJob{kind}"
    conditions = status.get("conditions") or []
    known = next((each for each in conditions if each["type"] == kind), None)
    if known is not None and (known["status"], known["reason"]) == (said, reason):
        return
    instead = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
    kept = [each for each in conditions if each["type"] not in (kind, instead)]
    if kind in ("Failed", "Succeeded"):
        kept = [{**each, "status": "False"} if each["type"] == "Running" else each for each in kept]
    now = stamp()
    fresh = {"type": kind, "status": said, "reason": reason, "message": message, "lastUpdateTime": now}
    status["conditions"] = [*kept, {**fresh, "lastTransitionTime": now}]


def _finished(status: Object) -> bool:
    return condition(status, "Succeeded") is not None or condition(status, "Failed") is not None
