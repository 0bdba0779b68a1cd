"""A job as an Indexed Job (`batch/v1`) and a headless Service: what every cluster has, without any operator.

https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..job import JobSpec
from . import names, pods
from .code import Object
from .options import KubernetesOptions

API_VERSION, KIND, PLURAL = "batch/v1", "Job", "jobs"
# What a shell, and accel's setup with it, says of a program that cannot be run: no attempt will find it.
HOPELESS = (126, 127)
_FAIL_WITH_DISRUPTION = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def build(
    spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str, template: Callable[..., Object]
) -> Object:
    """The Job. A pod's index is its node's rank; `service` makes the names by which they find each other."""
    made = template(env=environment(spec, f"{metadata['name']}-0.{metadata['name']}"))
    job = job_spec(spec, made, restarts=spec.retry.max_restarts * spec.nodes, service=metadata["name"])
    if not spec.retry.max_restarts:
        # A pod that is evicted or preempted is gone at once; this leaves the reason in the Job's condition.
        job["podFailurePolicy"]["rules"].append(_FAIL_WITH_DISRUPTION)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            **job,
            **({} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}),
            **({"suspend": True} if options.suspend or options.queue else {}),
        },
    }


def environment(spec: JobSpec, master: str) -> list[Object]:
    """What the pods read of their world; the index the cluster adds (JOB_COMPLETION_INDEX)."""
    return [
        {"name": "ACCEL_NODES", "value": str(spec.nodes)},
        {"name": "ACCEL_MASTER", "value": master},
        {"name": "ACCEL_PORT", "value": str(pods.PORT)},
    ]


def job_spec(spec: JobSpec, template: Object, *, restarts: int, service: str | None = None) -> Object:
    """A JobSpec with a pod for each node, which fails when more than `restarts` of its pods have failed."""
    inside = {**template["spec"], "restartPolicy": "Never", **({"subdomain": service} if service else {})}
    container = inside["containers"][0]["name"]
    rule = {"containerName": container, "operator": "In", "values": list(HOPELESS)}
    return {
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "completionMode": "Indexed",
        "backoffLimit": restarts,
        # With such a policy a pod is replaced when it is gone, never beside the one that ends. The schema of 1.25 asks
        # for the empty list.
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": rule, "onPodConditions": []}]},
        **({} if spec.time_limit_s is None else {"activeDeadlineSeconds": math.ceil(spec.time_limit_s)}),
        "template": {**template, "spec": inside},
    }


def service(spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str) -> Object:
    """The Service, without an address of its own: each pod has a name in it before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": names.labels(spec.name, job_id)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_ID: names.label_value(job_id)},
            # Whoever applies it on the server (Helm 4) must name the protocol where a server is old.
            "ports": [{"name": "rendezvous", "port": pods.PORT, "protocol": "TCP"}],
        },
    }


def warnings(spec: JobSpec, options: KubernetesOptions) -> list[str]:
    if spec.time_limit_s is not None and spec.retry.max_restarts:
        return ["a Job's time limit counts from its first start, over all attempts together"]
    return []
