"""A job as a JobSet (`jobset.x-k8s.io/v1alpha2`): a failure restarts all its pods together.

https://jobset.sigs.k8s.io/docs/
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...job import JobSpec
from .. import names, tpu_slices
from ..options import KubernetesOptions
from . import indexed, pods
from .code_delivery import Object

API_VERSION, KIND, PLURAL = "jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets"
REPLICATED = "node"
# Reasons of a Job's failure after which a restart is useless: its time limit, or a program that cannot be run. A JobSet
# has one reason for both: https://github.com/kubernetes-sigs/jobset, pkg/controllers/failure_policy.go
_TIME_OVER, _HOPELESS = "DeadlineExceeded", "PodFailurePolicy"
FAILED_FOR_GOOD = "FailJobSetFailurePolicyAction"
_ATTEMPT = f"metadata.annotations['{names.RESTART_ATTEMPT}']"


def build(
    spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str, template: Callable[..., Object]
) -> Object:
    """Build the JobSet: one Indexed Job of all nodes, or of each TPU slice, recreated for every attempt."""
    name = metadata["name"]
    master = f"{name}-{REPLICATED}-0-0.{name}"
    env = [*pods.world(spec, master), attempt(), *tpu_slices.variables(options, master)]
    pod_template = template(env=env, labels=tpu_slices.pod_labels(spec, options))
    annotations = {**tpu_slices.placement_annotations(spec, options), **metadata.get("annotations", {})}
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {**metadata, **({"annotations": annotations} if annotations else {})},
        "spec": {
            **set_spec(spec, pod_template, options.slices),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            **({} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}),
            **({"suspend": True} if options.suspend or options.queue else {}),
        },
    }


def set_spec(spec: JobSpec, template: Object, jobs: int = 1) -> Object:
    """Return the part of the JobSet's spec that a TrainingRuntime shares."""
    policy: Object = {"maxRestarts": spec.retry.max_restarts}
    if spec.retry.max_restarts:
        policy["restartStrategy"] = "BlockingRecreate"  # no pods of two attempts at once
    policy["rules"] = [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": [_TIME_OVER, _HOPELESS]}]
    job = indexed.job_spec(spec, template, restarts=0, jobs=jobs)
    return {
        "failurePolicy": policy,
        "replicatedJobs": [{"name": REPLICATED, "replicas": jobs, "template": {"spec": job}}],
    }


def why_for_good(workload: Mapping[str, Any], codes: Iterable[int]) -> str:
    """Return the reason for which the Job of a JobSet that is `FAILED_FOR_GOOD` failed.

    codes: the exit codes of its pods, which a Job keeps unless its time limit passed.
    """
    jobs = (workload.get("spec") or {}).get("replicatedJobs") or []
    limited = any("activeDeadlineSeconds" in job.get("template", {}).get("spec", {}) for job in jobs)
    return _TIME_OVER if limited and not set(indexed.HOPELESS) & set(codes) else _HOPELESS


def attempt() -> Object:
    return {"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": _ATTEMPT}}}


def warnings(spec: JobSpec, options: KubernetesOptions) -> list[str]:
    if spec.time_limit_s is not None and spec.retry.max_restarts:
        return ["each attempt of a JobSet has the whole time limit; the first that exceeds it is the last"]
    return []
