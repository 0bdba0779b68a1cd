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
ATTEMPT = pods.variable_from("JOBSET_RESTART_ATTEMPT", f"metadata.annotations['{names.RESTART_ATTEMPT}']")


def build_spec(
    spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Callable[..., Object]
) -> Object:
    """Build the JobSet's spec: one Indexed Job of all nodes, or of each TPU slice, recreated for every attempt."""
    master = f"{name}-{REPLICATED}-0-0.{name}"
    env = [*pods.world(spec, master), ATTEMPT, *tpu_slices.variables(options, master)]
    pod_template = template(env=env, labels=tpu_slices.pod_labels(spec, options))
    return {
        **set_spec(spec, pod_template, options.slices),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        **pods.lifecycle(options),
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
