"""A job as a TrainJob (`trainer.kubeflow.org/v1alpha1`) of Kubeflow Trainer v2, with a runtime of its own.

A TrainJob can change little of a shared runtime, and cannot set restarts. So each job has its own
TrainingRuntime, which is created first. https://www.kubeflow.org/docs/components/trainer/
"""

from __future__ import annotations

from collections.abc import Callable

from ...job import JobSpec
from ..options import KubernetesOptions
from . import jobset, pods
from .code_delivery import Object

API_VERSION, KIND, PLURAL = "trainer.kubeflow.org/v1alpha1", "TrainJob", "trainjobs"
RUNTIME_KIND, RUNTIME_PLURAL = "TrainingRuntime", "trainingruntimes"
_STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_VOLCANO_QUEUE = "scheduling.volcano.sh/queue-name"


def build_spec(
    spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, template: Callable[..., Object]
) -> Object:
    return {
        "runtimeRef": {"apiGroup": API_VERSION.partition("/")[0], "kind": RUNTIME_KIND, "name": name},
        "trainer": {"numNodes": spec.nodes, "numProcPerNode": pods.processes(spec)},
        **pods.lifecycle(options),
        **pods.deadline(spec),
    }


def runtime(spec: JobSpec, options: KubernetesOptions, metadata: Object, template: Callable[..., Object]) -> Object:
    """Build the TrainingRuntime of the TrainJob of the same name."""
    jobset_spec = jobset.set_spec(spec, template(env=[jobset.ATTEMPT]))
    job = jobset_spec["replicatedJobs"][0]["template"]
    # The TrainJob sets the number of pods and the time limit.
    for key in ("completions", "parallelism", "completionMode", "activeDeadlineSeconds"):
        job["spec"].pop(key, None)
    job["metadata"] = {"labels": {_STEP: "trainer"}}
    queue = options.volcano_queue
    return {
        "apiVersion": API_VERSION,
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
