"""The objects that run a job's pods: a Job, JobSet, PyTorchJob or TrainJob."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...job import JobSpec
from .. import names, tpu_slices
from ..options import KubernetesOptions
from . import pods
from .code_delivery import Object

# Returns a pod template with additions: see `build.template`.
Template = Callable[..., Object]


@dataclass(frozen=True, kw_only=True)
class Builder:
    """A kind of object that runs a job.

    build_spec:   returns its spec, from the job, the options, the object's name, the job's id and the pod template.
    installed_by: for messages.
    time_limit:   the warning about a time limit of a job with restarts. `{}`: the seconds until the cluster ends it.
    """

    api_version: str
    kind: str
    plural: str
    build_spec: Callable[[JobSpec, KubernetesOptions, str, str, Template], Object]
    installed_by: str
    time_limit: str


# An Indexed Job, which every cluster has without an operator. A headless Service names its pods.
# https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode

# The exit codes of a shell, and of accel's setup, for a program that cannot be run: no attempt would succeed.
_HOPELESS_CODES = (126, 127)
# The exit codes with which a Job fails at once, without a restart.
FINAL = (pods.TIME_LIMIT, *_HOPELESS_CODES)
_FAILURES = "batch.kubernetes.io/job-index-failure-count"
_FAIL_WITH_DISRUPTION = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _indexed_job(spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Template) -> Object:
    """Build the Job's spec. A pod's index is its node's rank; pods find each other by the names in its Service."""
    env, restarts = pods.world(spec, f"{name}-0.{name}"), spec.retry.max_restarts
    if restarts:  # the failures of the pod's index are its attempt; empty if the cluster does not count
        env.append(pods.variable_from("ACCEL_POD_FAILURES", f"metadata.annotations['{_FAILURES}']"))
    job = _job_spec(spec, template(env=env), restarts=restarts * spec.nodes, service=name)
    if restarts:  # only with a limit per index does the Job record earlier failures on a pod
        job |= {"backoffLimitPerIndex": restarts, "maxFailedIndexes": 0}
    else:  # an evicted or preempted pod is gone at once; this records the reason in the Job's condition
        job["podFailurePolicy"]["rules"].append(_FAIL_WITH_DISRUPTION)
    return {**job, **pods.lifecycle(options)}


def _job_spec(spec: JobSpec, template: Object, *, restarts: int, service: str | None = None, jobs: int = 1) -> Object:
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


# A JobSet: a failure restarts all its pods together. https://jobset.sigs.k8s.io/docs/

_REPLICATED = "node"
# Reasons of a Job's failure after which a restart is useless: its time limit, or a program that cannot be run. A JobSet
# has one reason for both: https://github.com/kubernetes-sigs/jobset, pkg/controllers/failure_policy.go
_TIME_OVER, _HOPELESS = "DeadlineExceeded", "PodFailurePolicy"
FAILED_FOR_GOOD = "FailJobSetFailurePolicyAction"
_ATTEMPT = pods.variable_from("JOBSET_RESTART_ATTEMPT", f"metadata.annotations['{names.RESTART_ATTEMPT}']")


def _jobset(spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Template) -> Object:
    """Build the JobSet's spec: one Indexed Job of all nodes, or of each TPU slice, recreated for every attempt."""
    master = f"{name}-{_REPLICATED}-0-0.{name}"
    env = [*pods.world(spec, master), _ATTEMPT, *tpu_slices.variables(options, master)]
    pod_template = template(env=env, labels=tpu_slices.pod_labels(spec, options))
    return {
        **_jobset_spec(spec, pod_template, options.slices),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        **pods.lifecycle(options),
    }


def _jobset_spec(spec: JobSpec, template: Object, jobs: int = 1) -> Object:
    """Return the part of the JobSet's spec that a TrainingRuntime shares."""
    policy: Object = {"maxRestarts": spec.retry.max_restarts}
    if spec.retry.max_restarts:
        policy["restartStrategy"] = "BlockingRecreate"  # no pods of two attempts at once
    policy["rules"] = [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": [_TIME_OVER, _HOPELESS]}]
    job = _job_spec(spec, template, restarts=0, jobs=jobs)
    return {
        "failurePolicy": policy,
        "replicatedJobs": [{"name": _REPLICATED, "replicas": jobs, "template": {"spec": job}}],
    }


def why_for_good(workload: Mapping[str, Any], codes: Iterable[int]) -> str:
    """Return the reason for which the Job of a JobSet that is `FAILED_FOR_GOOD` failed.

    codes: the exit codes of its pods, which a Job keeps unless its time limit passed.
    """
    jobs = (workload.get("spec") or {}).get("replicatedJobs") or []
    limited = any("activeDeadlineSeconds" in job.get("template", {}).get("spec", {}) for job in jobs)
    return _TIME_OVER if limited and not set(_HOPELESS_CODES) & set(codes) else _HOPELESS


# A PyTorchJob of Kubeflow's training operator, 1.7 to 1.9.
# https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/

# A label of pods of jobs without a master: a worker's index is its node's rank.
_WORKERS = {f"{names.PREFIX}elastic": "true"}


def _pytorchjob(spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Template) -> Object:
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


# A TrainJob of Kubeflow Trainer v2. It can change little of a shared runtime, and cannot set restarts. So each job has
# its own TrainingRuntime, which is created first, unless the target names one of the cluster.
# https://www.kubeflow.org/docs/components/trainer/

RUNTIME_API_VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIME_KIND, RUNTIME_PLURAL = "TrainingRuntime", "trainingruntimes"
_CLUSTER_RUNTIME_KIND = "ClusterTrainingRuntime"
# The fields of a pod and of its container that a TrainJob's `runtimePatches` may set.
_POD_FIELDS = (
    "affinity", "imagePullSecrets", "nodeSelector", "securityContext", "serviceAccountName",
    "terminationGracePeriodSeconds", "tolerations", "volumes",
)  # fmt: skip
_CONTAINER_FIELDS = ("name", "securityContext", "volumeMounts")
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


def _trainjob(spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Template) -> Object:
    kind = RUNTIME_KIND if options.runtime is None else _CLUSTER_RUNTIME_KIND
    group = RUNTIME_API_VERSION.partition("/")[0]
    trainjob: Object = {
        "runtimeRef": {"apiGroup": group, "kind": kind, "name": options.runtime or name},
        "trainer": {"numNodes": spec.nodes, "numProcPerNode": pods.processes(spec)},
        **pods.lifecycle(options),
        **pods.deadline(spec),
    }
    if options.runtime is not None:
        pod = template(env=[_ATTEMPT])
        trainjob["trainer"] |= _trainer(pod["spec"]["containers"][0])
        trainjob["runtimePatches"] = [_runtime_patch(pod)]
    return trainjob


def _trainer(container: Object) -> Object:
    """Return the fields of a TrainJob's `trainer` that run this container in a ClusterTrainingRuntime."""
    first, *rest = container["command"]
    if "workingDir" in container:  # it cannot be set
        change = ["-c", 'cd "$0" && exec "$@"', container["workingDir"]]
        first, rest = "sh", [*map(pods.unexpanded, change), first, *rest]
    resources = {"resourcesPerNode": container["resources"]} if "resources" in container else {}
    # Without `args`, the runtime's own would follow the command.
    return {"image": container["image"], "command": [first], "args": rest, "env": container["env"], **resources}


def _runtime_patch(pod: Object) -> Object:
    """Return the runtime patch with everything else of the pod that a TrainJob may set."""
    built = pod["spec"]["containers"][0]
    container = {key: built[key] for key in _CONTAINER_FIELDS if key in built}
    spec = {key: pod["spec"][key] for key in _POD_FIELDS if key in pod["spec"]}
    template = {"metadata": pod["metadata"], "spec": {**spec, "containers": [container]}}
    job = {"name": _REPLICATED, "template": {"spec": {"template": template}}}
    return {"manager": names.MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


def training_runtime(spec: JobSpec, options: KubernetesOptions, metadata: Object, template: Template) -> Object:
    """Build the TrainingRuntime of the TrainJob of the same name."""
    jobset_spec = _jobset_spec(spec, template(env=[_ATTEMPT]))
    job = jobset_spec["replicatedJobs"][0]["template"]
    # The TrainJob sets the number of pods and the time limit.
    for key in ("completions", "parallelism", "completionMode", "activeDeadlineSeconds"):
        job["spec"].pop(key, None)
    job["metadata"] = {"labels": {_STEP: "trainer"}}
    queue = options.volcano_queue
    return {
        "apiVersion": RUNTIME_API_VERSION,
        "kind": RUNTIME_KIND,
        "metadata": {**metadata, "labels": {**metadata["labels"], "trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": spec.nodes, "torch": {}},
            **({"podGroupPolicy": {"volcano": {}}} if queue else {}),
            "template": {
                **({"metadata": {"annotations": {_VOLCANO_QUEUE: queue}}} if queue else {}),
                "spec": jobset_spec,
            },
        },
    }


BUILDERS: Mapping[str, Builder] = {
    "pytorchjob": Builder(
        api_version="kubeflow.org/v1",
        kind="PyTorchJob",
        plural="pytorchjobs",
        build_spec=_pytorchjob,
        installed_by="Kubeflow's training operator, 1.7 to 1.9",
        time_limit="a PyTorchJob's time limit counts from its first start, over all attempts together",
    ),
    "jobset": Builder(
        api_version="jobset.x-k8s.io/v1alpha2",
        kind="JobSet",
        plural="jobsets",
        build_spec=_jobset,
        installed_by="the JobSet controller",
        time_limit="each attempt of a JobSet has the whole time limit; the first that exceeds it is the last",
    ),
    "job": Builder(
        api_version="batch/v1",
        kind="Job",
        plural="jobs",
        build_spec=_indexed_job,
        installed_by="Kubernetes itself",
        time_limit="each attempt of a Job has the whole time limit; the cluster ends it {} s after its start",
    ),
    "trainjob": Builder(
        api_version=RUNTIME_API_VERSION,
        kind="TrainJob",
        plural="trainjobs",
        build_spec=_trainjob,
        installed_by="Kubeflow Trainer v2",
        time_limit="each attempt of a TrainJob has the whole time limit; the cluster ends it {} s after its start",
    ),
}
