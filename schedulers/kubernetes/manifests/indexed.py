"""A job as an Indexed Job (`batch/v1`) and a headless Service, which every cluster has without an operator.

https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
"""

from __future__ import annotations

from collections.abc import Callable

from ...job import JobSpec
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


def build_spec(
    spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Callable[..., Object]
) -> Object:
    """Build the Job's spec. A pod's index is its node's rank; pods find each other by the names in its Service."""
    env, restarts = pods.world(spec, f"{name}-0.{name}"), spec.retry.max_restarts
    if restarts:  # the failures of the pod's index are its attempt; empty if the cluster does not count
        env.append(pods.variable_from("ACCEL_POD_FAILURES", f"metadata.annotations['{_FAILURES}']"))
    job = job_spec(spec, template(env=env), restarts=restarts * spec.nodes, service=name)
    if restarts:  # only with a limit per index does the Job record earlier failures on a pod
        job |= {"backoffLimitPerIndex": restarts, "maxFailedIndexes": 0}
    else:  # an evicted or preempted pod is gone at once; this records the reason in the Job's condition
        job["podFailurePolicy"]["rules"].append(_FAIL_WITH_DISRUPTION)
    return {**job, **pods.lifecycle(options)}


def job_spec(spec: JobSpec, template: Object, *, restarts: int, service: str | None = None, jobs: int = 1) -> Object:
    """Return the spec of a Job, one of `jobs` equal ones, with one pod per node.

    It fails when more than `restarts` of its pods have failed.
    """
    pod_spec = {**template["spec"], "restartPolicy": "Never", **({"subdomain": service} if service else {})}
    container = pod_spec["containers"][0]["name"]
    rule = {"containerName": container, "operator": "In", "values": list(FINAL)}
    return {
        "completions": spec.nodes // jobs,
        "parallelism": spec.nodes // jobs,
        "completionMode": "Indexed",
        "backoffLimit": restarts,
        # With such a policy a pod is replaced only when it is gone, not while it ends. The schema of 1.25 requires
        # the empty list.
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": rule, "onPodConditions": []}]},
        **pods.deadline(spec),
        "template": {**template, "spec": pod_spec},
    }
