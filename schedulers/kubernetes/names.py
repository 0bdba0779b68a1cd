"""Names and labels of a job's objects.

https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and …/labels/
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..object_names import HASH, short_hash, slug

PREFIX = "accel.dev/"
JOB_ID = "accel.dev/job-id"
NAME = "accel.dev/name"
DIGEST = "accel.dev/digest"
SPEC = "accel.dev/spec"
# An annotation of a pod: REPORTED if its launcher stays and reports the end in the termination message, NOT_REPORTED if
# the program replaces it. Pods of older versions have none.
REPORT, REPORTED, NOT_REPORTED = "accel.dev/report", "launcher", "none"
END = "accel.dev/end"  # the failure, recorded before the pods are gone
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "accel.dev/submit"  # of the runtime patch in a TrainJob
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
# A label and an annotation of a JobSet's Jobs and pods.
RESTART_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
# A label (Kubernetes 1.28) and an annotation of the pods of an Indexed Job.
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
# A label of the pods of a PyTorchJob, set by the operator.
REPLICA_INDEX = "training.kubeflow.org/replica-index"
# Labels of the pods of a JobSet of several Jobs: the Job's index, and the number of pods of each Job.
JOB_INDEX, SLICE_HOSTS = "jobset.sigs.k8s.io/job-index", "accel.dev/slice-hosts"
# The training container's name; it depends on the operator.
MAIN = ("pytorch", "node")

_MAX_LABEL = 63
_MAX_SUBDOMAIN = 253
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?\Z")
_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?\Z")
_QUALIFIED = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?\Z")


def is_label(text: str) -> bool:
    """Return True for a DNS-1123 label."""
    return len(text) <= _MAX_LABEL and _LABEL.match(text) is not None


def is_subdomain(text: str) -> bool:
    """Return True for a DNS-1123 subdomain, the form of most objects' names."""
    return 0 < len(text) <= _MAX_SUBDOMAIN and all(is_label(part) for part in text.split("."))


def is_label_value(text: str) -> bool:
    return len(text) <= _MAX_LABEL and _VALUE.match(text) is not None


def is_qualified(text: str) -> bool:
    """Return True for a valid name of a label, an annotation or a resource: `name` or `prefix/name`."""
    prefix, slash, name = text.rpartition("/")
    return len(name) <= _MAX_LABEL and _QUALIFIED.match(name) is not None and (not slash or is_subdomain(prefix))


def label_value(text: str) -> str:
    """Return the text as a label value: unchanged if valid, else a readable part of it and its hash."""
    if text and is_label_value(text):
        return text
    head = slug(text)[: _MAX_LABEL - HASH - 1].rstrip("-")
    return f"{head}-{short_hash(text)}" if head else short_hash(text)


def labels(name: str, job_id: str) -> dict[str, str]:
    """Return the labels of everything that belongs to the job."""
    return {MANAGED_BY: "accel", JOB_ID: label_value(job_id), NAME: label_value(name)}


def selector(job_id: str) -> str:
    """Return the label selector of the job's objects."""
    return f"{JOB_ID}={label_value(job_id)}"


def selector_of(jobs: Iterable[str]) -> str:
    """Return the label selector of these jobs' objects. `jobs`: their label values."""
    return f"{JOB_ID} in ({','.join(sorted(jobs))})"


def marks(pod: Mapping[str, Any]) -> dict[str, str]:
    """Return the pod's annotations and labels."""
    metadata = pod.get("metadata") or {}
    return {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}


def node_of(pod: Mapping[str, Any]) -> int | None:
    """Return the pod's node index (in an elastic world its pod index), or None for a pod of another kind."""
    attributes = marks(pod)
    index, replica = attributes.get(COMPLETION_INDEX), attributes.get(REPLICA_INDEX)
    kind = attributes.get("training.kubeflow.org/replica-type")
    if index is not None and index.isdigit():
        job, hosts = str(attributes.get(JOB_INDEX, "")), str(attributes.get(SLICE_HOSTS, ""))
        return int(index) + (int(job) * int(hosts) if job.isdigit() and hosts.isdigit() else 0)
    if replica is None or not replica.isdigit():
        return None
    # Workers come after the master, unless the pods say that there is none.
    is_elastic = attributes.get(f"{PREFIX}elastic") == "true"
    return int(replica) + (1 if kind == "worker" and not is_elastic else 0)
