"""A job as a JobSet (`jobset.x-k8s.io/v1alpha2`): a failure restarts all its pods together.

https://jobset.sigs.k8s.io/docs/
"""

from __future__ import annotations

from collections.abc import Callable

from ..job import JobSpec
from . import indexed
from .code import Object
from .options import KubernetesOptions

API_VERSION, KIND, PLURAL = "jobset.x-k8s.io/v1alpha2", "JobSet", "jobsets"
REPLICATED = "node"
_ATTEMPT = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"


def build(
    spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str, template: Callable[..., Object]
) -> Object:
    """The JobSet: one Indexed Job of all nodes, made anew for every attempt."""
    name = metadata["name"]
    made = template(env=[*indexed.environment(spec, f"{name}-{REPLICATED}-0-0.{name}"), attempt()])
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            **set_spec(spec, made),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            **({} if options.ttl_s is None else {"ttlSecondsAfterFinished": options.ttl_s}),
            **({"suspend": True} if options.suspend or options.queue else {}),
        },
    }


def set_spec(spec: JobSpec, template: Object) -> Object:
    """What Trainer's runtimes say too."""
    policy: Object = {"maxRestarts": spec.retry.max_restarts}
    if spec.retry.max_restarts:
        policy["restartStrategy"] = "BlockingRecreate"  # no pod of an attempt meets one of the last
    job = indexed.job_spec(spec, template, restarts=0)
    return {
        "failurePolicy": policy,
        "replicatedJobs": [{"name": REPLICATED, "replicas": 1, "template": {"spec": job}}],
    }


def attempt() -> Object:
    return {"name": "JOBSET_RESTART_ATTEMPT", "valueFrom": {"fieldRef": {"fieldPath": _ATTEMPT}}}


def warnings(spec: JobSpec, options: KubernetesOptions) -> list[str]:
    return []
