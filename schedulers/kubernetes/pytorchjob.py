"""A job as a PyTorchJob (`kubeflow.org/v1`) of Kubeflow's training operator, 1.7 to 1.9.

https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..job import JobSpec
from . import names, pods
from .code import Object
from .options import KubernetesOptions

API_VERSION, KIND, PLURAL = "kubeflow.org/v1", "PyTorchJob", "pytorchjobs"


def build(
    spec: JobSpec, options: KubernetesOptions, metadata: Object, job_id: str, template: Callable[..., Object]
) -> Object:
    """The object. One node is a master; more are a master and workers; a world that may grow has workers only.

    `template` makes the pods' template out of what only this kind needs.
    """
    if spec.max_nodes is None:
        replicas = {"Master": 1} | ({"Worker": spec.nodes - 1} if spec.nodes > 1 else {})
        made = template()
    else:
        replicas = {"Worker": spec.max_nodes}
        made = template(launch=_elastic_launch(spec, metadata["name"], job_id), labels={f"{names.OWN}elastic": "true"})
    restart = "OnFailure" if spec.retry.max_restarts else "Never"
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": metadata,
        "spec": {
            "nprocPerNode": str(pods.processes(spec)),
            "runPolicy": _run_policy(spec, options),
            **({} if spec.max_nodes is None else {"elasticPolicy": _elastic_policy(spec, job_id)}),
            "pytorchReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": restart, "template": made}
                for role, count in replicas.items()
            },
        },
    }


def warnings(spec: JobSpec, options: KubernetesOptions) -> list[str]:
    found = []
    if spec.nodes > 1 and spec.max_nodes is None and options.pod_security == "restricted":
        found.append(
            "the training operator adds an init container that says nothing of its security: a namespace that "
            "enforces the restricted standard refuses it, until the operator has another template for it "
            "(--pytorch-init-container-template-file); workload: jobset needs none"
        )
    if spec.max_nodes is not None and not spec.retry.max_restarts:
        found.append(
            f"--nodes {spec.nodes}:{spec.max_nodes} without --max-restarts: pods may join, and the first that goes "
            "(evicted, its node lost, a rank that failed) ends the job"
        )
    if spec.time_limit_s is not None and spec.retry.max_restarts:
        found.append("a PyTorchJob's time limit counts from its first start, over all attempts together")
    return found


def _run_policy(spec: JobSpec, options: KubernetesOptions) -> Object:
    most = spec.max_nodes or spec.nodes
    restarts = spec.retry.max_restarts
    policy: Object = {"cleanPodPolicy": "None"}
    if restarts:
        # The operator adds up the restarts of all pods, each of which restarts with the gang, and ends the job when
        # the sum reaches the limit. It then deletes the pods, logs and exit codes with them: so there is no limit of 0.
        policy["backoffLimit"] = restarts * most + 1
    if spec.time_limit_s is not None:
        policy["activeDeadlineSeconds"] = math.ceil(spec.time_limit_s)
    if options.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = options.ttl_s
    if options.suspend or options.queue:
        policy["suspend"] = True
    if options.volcano_queue:
        policy["schedulingPolicy"] = {"minAvailable": spec.nodes, "queue": options.volcano_queue}
    return policy


def _elastic_policy(spec: JobSpec, job_id: str) -> Object:
    return {
        "minReplicas": spec.nodes,
        "maxReplicas": spec.max_nodes,
        "rdzvBackend": "c10d",
        "rdzvId": job_id,
        "maxRestarts": spec.retry.max_restarts,
    }


def _elastic_launch(spec: JobSpec, name: str, job_id: str) -> Sequence[str]:
    return (
        "--num_machines", f"{spec.nodes}:{spec.max_nodes}", "--rdzv_backend", "c10d", "--rdzv_id", job_id,
        "--main_process_ip", f"{name}-worker-0", "--main_process_port", str(pods.PORT),
        "--max_restarts", str(spec.retry.max_restarts),
    )  # fmt: skip
