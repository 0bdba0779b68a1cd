"""A job as an Indexed Job (`batch/v1`) and a headless Service, which every cluster has without an operator.

https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
"""

from __future__ import annotations

from collections.abc import Callable

from ...job import JobSpec
from .. import names
from ..options import KubernetesOptions
from . import pods
from .code_delivery import Object

API_VERSION, KIND, PLURAL = "batch/v1", "Job", "jobs"
# The exit codes of a shell, and of accel's setup, for a program that cannot be run: no attempt would succeed.
HOPELESS = (126, 127)
# The exit codes with which a Job fails at once, without a restart.
FINAL = (pods.TIME_LIMIT, *HOPELESS)
_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_FAIL_WITH_DISRUPTION = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def build(
    spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str, template: Callable[..., Object]
) -> Object:
    """Build the Job. A pod's index is its node's rank; pods find each other by the names in `service`."""
    env = pods.world(spec, f"{metadata['name']}-0.{metadata['name']}")
    pod_template = template(env=[*env, *([failures()] if spec.retry.max_restarts else [])])
    job = job_spec(spec, pod_template, restarts=spec.retry.max_restarts * spec.nodes, service=metadata["name"])
    if not spec.retry.max_restarts:
        # An evicted or preempted pod is gone at once; this records the reason in the Job's condition.
        job["podFailurePolicy"]["rules"].append(_FAIL_WITH_DISRUPTION)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            **job,
            **_per_index(spec),
            **({} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}),
            **({"suspend": True} if options.suspend or options.queue else {}),
        },
    }


def failures() -> Object:
    """Return the variable with the failures of the pod's index, its attempt. Empty if the cluster does not count."""
    return {
        "name": "ACCEL_POD_FAILURES",
        "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_FAILURES}']"}},
    }


def _per_index(spec: JobSpec) -> Object:
    """Return a limit per index: only with one does the Job record earlier failures on a pod."""
    if not spec.retry.max_restarts:
        return {}
    return {"backoffLimitPerIndex": spec.retry.max_restarts, "maxFailedIndexes": 0}


def job_spec(spec: JobSpec, template: Object, *, restarts: int, service: str | None = None, jobs: int = 1) -> Object:
    """Return the spec of a Job, one of `jobs` equal ones, with one pod per node.

    It fails when more than `restarts` of its pods have failed.
    """
    pod_spec = {**template["spec"], "restartPolicy": "Never", **({"subdomain": service} if service else {})}
    container = pod_spec["containers"][0]["name"]
    rule = {"containerName": container, "operator": "In", "values": list(FINAL)}
    limit_s = pods.backstop_s(spec)
    return {
        "completions": spec.nodes // jobs,
        "parallelism": spec.nodes // jobs,
        "completionMode": "Indexed",
        "backoffLimit": restarts,
        # With such a policy a pod is replaced only when it is gone, not while it ends. The schema of 1.25 requires
        # the empty list.
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": rule, "onPodConditions": []}]},
        **({} if limit_s is None else {"activeDeadlineSeconds": limit_s}),
        "template": {**template, "spec": pod_spec},
    }


def service(spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str) -> Object:
    """Build the headless Service, in which each pod has a name before it is ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**metadata, "labels": names.labels(spec.name, job_id)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.JOB_ID: names.label_value(job_id)},
            # A server-side apply (Helm 4) on an old server needs the protocol.
            "ports": [{"name": "rendezvous", "port": pods.PORT, "protocol": "TCP"}],
        },
    }


def warnings(spec: JobSpec, options: KubernetesOptions) -> list[str]:
    if spec.time_limit_s is not None and spec.retry.max_restarts:
        end = f"the cluster ends it {pods.backstop_s(spec)} s after its start"
        return [f"each attempt of a Job has the whole time limit; {end}"]
    return []
