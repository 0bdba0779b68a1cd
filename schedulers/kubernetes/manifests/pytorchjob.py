"""A job as a PyTorchJob (`kubeflow.org/v1`) of Kubeflow's training operator, 1.7 to 1.9.

https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...job import JobSpec
from .. import names
from ..options import KubernetesOptions
from . import pods
from .code_delivery import Object

# A label of pods of jobs without a master: a worker's index is its node's rank.
_WORKERS = {f"{names.PREFIX}elastic": "true"}
API_VERSION, KIND, PLURAL = "kubeflow.org/v1", "PyTorchJob", "pytorchjobs"


def build_spec(
    spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Callable[..., Object]
) -> Object:
    """Build the PyTorchJob's spec.

    One node is a master. Several are workers only: for a master the operator would add an init container, which has
    no security context and looks up the master's name too early. An elastic job has an elasticPolicy, under which the
    first worker that exits with 0 ends the job; without it, all must.
    """
    max_nodes = spec.max_nodes or spec.nodes
    replicas = {"Worker": max_nodes} if max_nodes > 1 else {"Master": 1}
    if spec.max_nodes is not None:
        pod_template = template(launch=_elastic_launch(spec, name, job_id), labels=_WORKERS)
    elif spec.nodes > 1:
        rank = pods.variable_from("ACCEL_NODE_RANK", f"metadata.labels['{names.REPLICA_INDEX}']")
        pod_template = template(env=[rank, *pods.world(spec, f"{name}-worker-0")], labels=_WORKERS)
    else:
        pod_template = template()
    restart = "OnFailure" if spec.retry.max_restarts else "Never"
    return {
        "nprocPerNode": str(pods.processes(spec)),
        "runPolicy": _run_policy(spec, options),
        **({} if spec.max_nodes is None else {"elasticPolicy": _elastic_policy(spec, job_id)}),
        "pytorchReplicaSpecs": {
            role: {"replicas": count, "restartPolicy": restart, "template": pod_template}
            for role, count in replicas.items()
        },
    }


def _run_policy(spec: JobSpec, options: KubernetesOptions) -> Object:
    max_nodes = spec.max_nodes or spec.nodes
    restarts = spec.retry.max_restarts
    # When the job has ended, no pod may wait for one that never comes. An elastic job ends with its first pod, and the
    # others must finish.
    policy: Object = {"cleanPodPolicy": "Running" if spec.max_nodes is None else "None"}
    if restarts:
        # All pods restart together. The operator ends the job when the sum of their restarts reaches the limit, and
        # deletes the pods with their logs and exit codes: so without restarts there is no limit.
        policy["backoffLimit"] = restarts * max_nodes + 1
    policy |= {**pods.deadline(spec), **pods.lifecycle(options)}
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
