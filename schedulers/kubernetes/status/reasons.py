"""Tables that map Kubernetes' reasons for pods, containers, jobs and events to accel's.

Pods and containers: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ and the kubelet's
`pkg/kubelet/images/types.go`, `…/container/sync_result.go`, `…/lifecycle/predicate.go`; disruptions:
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/; Jobs: `k8s.io/api/batch/v1`;
the training operator: `pkg/controller.v1/common/job.go`; JobSet: `pkg/constants`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...job import Reason

ReasonAndMessage = tuple[Reason, str]

# The reason why a container waits. Other reasons are shown unchanged.
WAITING: Mapping[str, ReasonAndMessage] = {
    "ContainerCreating": (Reason.NONE, ""),
    "PodInitializing": (Reason.NONE, ""),
    "ErrImagePull": (Reason.SETUP, "the image cannot be pulled"),
    "ImagePullBackOff": (Reason.SETUP, "the image cannot be pulled"),
    "ErrImageNeverPull": (Reason.SETUP, "the image is not on the node, and image_pull_policy is Never"),
    "InvalidImageName": (Reason.SETUP, "the image's name is not valid"),
    "ImageInspectError": (Reason.SETUP, "the image is damaged on the node"),
    "RegistryUnavailable": (Reason.SETUP, "the image's registry does not answer"),
    "SignatureValidationFailed": (Reason.SETUP, "the image's signature is not valid"),
    "CreateContainerConfigError": (Reason.SETUP, "the container cannot be created"),
    "CreateContainerError": (Reason.SETUP, "the container cannot be created"),
    "RunContainerError": (Reason.SETUP, "the container cannot be started"),
    "PreStartHookError": (Reason.SETUP, "the container cannot be started"),
    "PostStartHookError": (Reason.SETUP, "the container cannot be started"),
    "CrashLoopBackOff": (Reason.EXIT_CODE, "it failed and waits for a restart"),
}

# A phrase in the kubelet's message -> advice.
ADVICE: tuple[tuple[str, str], ...] = (
    ("runAsNonRoot", "the image's user is root or has no number: run_as_user: 1000 names another"),
    ("non-root", "the image's user is root or has no number: run_as_user: 1000 names another"),
)

# The reason of a container's end, if the exit code does not suffice.
TERMINATED: Mapping[str, ReasonAndMessage] = {
    "OOMKilled": (Reason.OUT_OF_MEMORY, "it used more memory than the pod may (--memory)"),
    "ContainerCannotRun": (Reason.SETUP, "the container could not be started"),
    "StartError": (Reason.SETUP, "the container could not be started"),
    "DeadlineExceeded": (Reason.TIME_LIMIT, "its time limit passed"),
}

# A pod's own `status.reason`.
POD: Mapping[str, ReasonAndMessage] = {
    "Evicted": (Reason.PREEMPTED, "its pod was evicted"),
    "Preempting": (Reason.PREEMPTED, "its pod was preempted by one of higher priority"),
    "Preempted": (Reason.PREEMPTED, "its pod was preempted by one of higher priority"),
    "NodeLost": (Reason.NODE_FAILURE, "its node was lost"),
    "NodeShutdown": (Reason.NODE_FAILURE, "its node was shut down"),
    "Shutdown": (Reason.NODE_FAILURE, "its node was shut down"),
    "Terminated": (Reason.NODE_FAILURE, "its node was shut down"),
    "NodeAffinity": (Reason.NO_CAPACITY, "its node no longer fits it"),
    "OutOfcpu": (Reason.NO_CAPACITY, "its node had no cores left"),
    "OutOfmemory": (Reason.NO_CAPACITY, "its node had no memory left"),
    "OutOfpods": (Reason.NO_CAPACITY, "its node takes no more pods"),
    "UnexpectedAdmissionError": (Reason.NO_CAPACITY, "its node could not give it its devices"),
    "DeadlineExceeded": (Reason.TIME_LIMIT, "its time limit passed"),
}

# The messages of evictions of pods that exceeded their own limit. (Others are evicted because the node's disk is full.)
# https://github.com/kubernetes/kubernetes/blob/master/pkg/kubelet/eviction/helpers.go
OWN_STORAGE = re.compile(
    "ephemeral local storage usage exceeds|exceeded its local ephemeral storage limit|Usage of EmptyDir volume"
)
STORAGE: ReasonAndMessage = (
    Reason.EXIT_CODE,
    "it used more local storage than the pod may (resources: ephemeral-storage)",
)

# The reason of a pod's condition DisruptionTarget.
DISRUPTED: Mapping[str, ReasonAndMessage] = {
    "PreemptionByScheduler": (Reason.PREEMPTED, "its pod was preempted by one of higher priority"),
    "PreemptionByKubeScheduler": (Reason.PREEMPTED, "its pod was preempted by one of higher priority"),
    "EvictionByEvictionAPI": (Reason.PREEMPTED, "its pod was evicted, as when a node is drained"),
    "TerminationByKubelet": (Reason.PREEMPTED, "its node ran short of a resource, or was shut down"),
    "DeletionByTaintManager": (Reason.NODE_FAILURE, "its node was lost, or tainted"),
    "DeletionByPodGC": (Reason.NODE_FAILURE, "its node is gone"),
}

# The reason of a job's condition Failed, FailureTarget or Suspended.
JOB: Mapping[str, ReasonAndMessage] = {
    "BackoffLimitExceeded": (Reason.EXIT_CODE, ""),
    "MaxFailedIndexesExceeded": (Reason.EXIT_CODE, ""),
    "FailedIndexes": (Reason.EXIT_CODE, ""),
    "PodFailurePolicy": (Reason.SETUP, "its program could not be run"),
    "DeadlineExceeded": (Reason.TIME_LIMIT, "its time limit passed"),
    "ReachedMaxRestarts": (Reason.EXIT_CODE, ""),
    "FailedJobs": (Reason.EXIT_CODE, ""),
    "FailJobSetFailurePolicyAction": (Reason.EXIT_CODE, ""),
    "PyTorchJobFailed": (Reason.EXIT_CODE, ""),
    "TrainingRuntimeNotSupported": (Reason.SETUP, "its runtime does not exist"),
    "TrainJobJobsCreationFailed": (Reason.SETUP, "its pods could not be created"),
    "JobsCreationFailed": (Reason.SETUP, "its pods could not be created"),
}
# For a Job without restarts: the cluster deleted one of its pods, which is gone.
DISRUPTION: ReasonAndMessage = (Reason.PREEMPTED, "its pod was evicted or preempted, or its node was lost")
BACK_OFF = "specified backoff limit"
# The training operator has one reason for all failures; only its message distinguishes them.
JOB_MESSAGES: tuple[tuple[str, ReasonAndMessage], ...] = (
    ("longer than specified deadline", (Reason.TIME_LIMIT, "its time limit passed")),
    (BACK_OFF, (Reason.EXIT_CODE, "")),
    ("has condition DisruptionTarget", DISRUPTION),
)

# Prefixes of the reasons of events about pods that cannot be created.
REFUSALS = ("FailedCreate", "JobCreationFailed", "TrainJobResourcesCreationFailed")
# The kubelet's messages in a pod's first second, about volumes that are not missing.
TRANSIENT_MESSAGES = ("failed to sync configmap cache", "failed to sync secret cache", "not registered")
# The scheduler's message about a claim that does not exist.
NO_CLAIM = re.compile(r'persistentvolumeclaim "[^"]*" not found')
# A phrase in the message of a Warning event -> its meaning. The first match counts.
EVENTS: tuple[tuple[str, ReasonAndMessage], ...] = (
    ("exceeded quota", (Reason.NO_CAPACITY, "the namespace's quota does not allow its pods")),
    ("failed quota", (Reason.SETUP, "the namespace's quota requires --cpus and --memory")),
    ("violates PodSecurity", (Reason.SETUP, "the namespace's Pod Security Standard refuses its pods")),
    ("denied the request", (Reason.SETUP, "an admission webhook refuses its pods")),
    ("serviceaccount", (Reason.SETUP, "its service account does not exist")),
    ("no PriorityClass with name", (Reason.SETUP, "its priority class does not exist")),
    ("is forbidden", (Reason.SETUP, "the cluster refuses its pods")),
)
# The reason of an event of a pod that does not start -> its meaning.
POD_EVENTS: Mapping[str, ReasonAndMessage] = {
    "FailedScheduling": (Reason.NO_CAPACITY, "no node fits"),
    "FailedMount": (Reason.SETUP, "a volume cannot be mounted"),
    "FailedAttachVolume": (Reason.SETUP, "a volume cannot be attached"),
    "FailedMapVolume": (Reason.SETUP, "a volume cannot be mounted"),
    "FailedCreatePodSandBox": (Reason.SETUP, "the pod's network or sandbox cannot be created"),
    "NetworkNotReady": (Reason.SETUP, "the node's network is not ready"),
    "FailedCreate": (Reason.SETUP, "its pods cannot be created"),
    "FailedCreatePod": (Reason.SETUP, "its pods cannot be created"),
    "FailedCreateService": (Reason.SETUP, "its Services cannot be created"),
}
