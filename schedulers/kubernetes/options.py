"""Options of a Kubernetes target and their validation."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import SpecError
from . import names

Workload = Literal["pytorchjob", "jobset", "job", "trainjob"]
CodeDelivery = Literal["auto", "configmap", "pvc", "store", "image"]
Vendor = Literal["nvidia", "amd", "intel", "gaudi", "neuron", "tpu"]
Security = Literal["restricted", "baseline", "privileged"]

# Slices of TPUs on GKE: https://cloud.google.com/kubernetes-engine/docs/concepts/tpus
TPU_RESOURCE, TPU_LABEL = "google.com/tpu", "cloud.google.com/gke-tpu-accelerator"
TPU_TOPOLOGY = "cloud.google.com/gke-tpu-topology"
# Vendor -> the resource of its device plug-in, and the node label with the type of the devices.
VENDORS: Mapping[str, tuple[str, str]] = {
    "nvidia": ("nvidia.com/gpu", "nvidia.com/gpu.product"),
    "amd": ("amd.com/gpu", "amd.com/gpu.product-name"),
    "intel": ("gpu.intel.com/i915", "gpu.intel.com/product"),
    "gaudi": ("habana.ai/gaudi", "node.kubernetes.io/instance-type"),
    "neuron": ("aws.amazon.com/neuron", "node.kubernetes.io/instance-type"),
    "tpu": (TPU_RESOURCE, TPU_LABEL),
}

_SOURCES = ("claim", "config_map", "secret", "host_path", "nfs", "source")
_TOPOLOGY_FORM = re.compile(r"[1-9]\d*(x[1-9]\d*){1,2}")
_QUANTITY = re.compile(r"\d+(\.\d+)?([eE]\d+|[numkMGTPE]|[KMGTPE]i)?\Z")
_RESERVED_MOUNTS = ("/accel", "/accel/code", "/accel/home", "/accel/packed", "/accel-code", "/dev/shm")
_MAX_ID = 2**31 - 1
# Options that a TrainJob cannot set in a ClusterTrainingRuntime (`PodSpecPatch` in
# https://github.com/kubeflow/trainer/blob/master/pkg/apis/trainer/v1alpha1/trainjob_types.go).
_SET_BY_RUNTIME = ("host_network", "image_pull_policy", "pod_patch", "priority_class", "volcano_queue")


@dataclass(frozen=True, kw_only=True)
class Toleration:
    """A toleration of the pods. `operator` defaults to Equal with a value, else to Exists; no `key` means every key."""

    key: str | None = None
    operator: Literal["Equal", "Exists"] | None = None
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    seconds: int | None = None


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A volume that every pod mounts at `mount`.

    Exactly one source: a PersistentVolumeClaim, a ConfigMap, a Secret, a directory of the node, an NFS export
    (`server:/path`), or any volume source as Kubernetes spells it (`{csi: {driver: …}}`).
    """

    mount: str
    claim: str | None = None
    config_map: str | None = None
    secret: str | None = None
    host_path: str | None = None
    nfs: str | None = None
    source: Mapping[str, Any] | None = None
    sub_path: str | None = None
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """An object store for code, with the S3 API.

    url:      `s3://bucket/prefix`.
    image:    an image with the `aws` command, which downloads the code in an init container.
    endpoint: for a store that is not Amazon's, such as `https://minio.storage:9000`.
    secret:   the Secret with the keys AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if needed,
              AWS_SESSION_TOKEN; default: the permissions of the service account.
    """

    url: str
    image: str
    endpoint: str | None = None
    region: str | None = None
    secret: str | None = None


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The options of a Kubernetes target in `accel.yaml`.

    kubeconfig, context: the file, instead of $KUBECONFIG and ~/.kube/config, and the context in it.
    namespace:       the namespace of all objects; default: the context's.
    workload:        pytorchjob (Kubeflow's training operator), jobset, job (Indexed Job and a Service, without an
                     operator) or trainjob (Kubeflow Trainer v2).
    runtime:         a ClusterTrainingRuntime for TrainJobs, instead of a TrainingRuntime of each job's own.
    image:           the container image of jobs without --image.
    image_pull_policy, image_pull_secrets, service_account, priority_class: as in a pod.
    python:          the interpreter in the image that has accel; default: the command `accel` on the PATH.
    cpu:             train on the CPU even if there are GPUs.
    setup:           argvs run once in every pod before the ranks start, before those of the job.
    start_timeout_s: the time that the pods wait for each other.
    code:            delivery of the code: configmap (1 MiB, packed), pvc, store or image (it is in the image);
                     auto uses a ConfigMap and, for larger code, `code_claim` or `code_store`.
    code_claim:      a PersistentVolumeClaim for snapshots, readable from every node.
    code_store:      an object store for snapshots.
    code_dir:        the code's directory in the image; default: the image's working directory.
    gpu:             the vendor of the GPUs that --gpus counts.
    gpu_resource:    another resource name for the GPUs (`nvidia.com/mig-1g.10gb`).
    gpu_label:       the node label whose value --accelerator selects.
    tpu_topology:    a slice's topology on GKE, such as 2x2x2, with `gpu: tpu`: --gpus counts the chips of a host, and
                     the number of nodes follows.
    slices:          the number of TPU slices that work together (workload jobset).
    accelerators:    the values of --accelerator, instead of `gpu_label`: name -> node labels.
    resources:       further resources of each pod: `{rdma/hca_shared_devices_a: 1, ephemeral-storage: 100Gi}`.
    host_network:    the pods use their nodes' network.
    ipc_lock:        the pods may pin memory (RDMA, TPUs). `host_network`, `ipc_lock` and a volume's `host_path` need
                     `pod_security: privileged`.
    node_selector, tolerations, affinity, volumes: the nodes that pods may run on, and the pods' mounts.
    queue, queue_priority: Kueue's LocalQueue and WorkloadPriorityClass.
    volcano_queue:   Volcano's queue; Volcano then schedules all pods or none.
    suspend:         create the job suspended.
    ttl_s:           seconds after its end until the cluster removes the job and its logs.
    pod_security:    the Pod Security Standard of the pods.
    read_only_root_filesystem: the image's files are read-only; /tmp and HOME are the pod's own. Not with `setup`.
    run_as_user, run_as_group, fs_group: numeric ids, for images whose user is root or has no number.
    labels, annotations: further labels and annotations of the job and its pods.
    patch:           a strategic merge patch for the job's object, applied last; `pod_patch` is one for its pods.
    """

    kubeconfig: str | None = None
    context: str | None = None
    namespace: str | None = None
    workload: Workload = "pytorchjob"
    runtime: str | None = None
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[str, ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    python: str | None = None
    cpu: bool = False
    setup: tuple[tuple[str, ...], ...] = ()
    start_timeout_s: float = 1800.0
    code: CodeDelivery = "auto"
    code_claim: str | None = None
    code_store: ObjectStore | None = None
    code_dir: str | None = None
    gpu: Vendor = "nvidia"
    gpu_resource: str | None = None
    gpu_label: str | None = None
    tpu_topology: str | None = None
    slices: int = 1
    accelerators: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    resources: Mapping[str, str | int | float] = field(default_factory=dict)
    host_network: bool = False
    ipc_lock: bool = False
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    volumes: tuple[Volume, ...] = ()
    queue: str | None = None
    queue_priority: str | None = None
    volcano_queue: str | None = None
    suspend: bool = False
    ttl_s: int | None = None
    pod_security: Security = "restricted"
    read_only_root_filesystem: bool = False
    run_as_user: int | None = None
    run_as_group: int | None = None
    fs_group: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    patch: Mapping[str, Any] = field(default_factory=dict)
    pod_patch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_pod_group(self) -> bool:
        """True if accel creates Volcano's PodGroup. For other workloads Volcano or their operator does."""
        return self.volcano_queue is not None and self.workload in ("job", "jobset")


def gpu_resource(options: KubernetesOptions) -> str:
    return options.gpu_resource or VENDORS[options.gpu][0]


def is_word(text: str) -> bool:
    return text.isprintable() and len(text.split()) == 1 and text == text.strip()


def check(options: KubernetesOptions, name: str) -> None:
    """Raise SpecError, which names the key, if an option is invalid."""
    for problem in _problems(options):
        raise SpecError(f"target {name}: {problem}")


def _problems(options: KubernetesOptions) -> Iterator[str]:
    yield from _name_problems(options)
    yield from _code_problems(options)
    yield from _label_problems(options)
    yield from _placement_problems(options)
    yield from _slice_problems(options)
    yield from _runtime_problems(options)
    yield from _queue_problems(options)
    yield from _security_problems(options)
    if not 0 < options.start_timeout_s < float("inf"):
        yield f"start_timeout_s must be more than 0, not {options.start_timeout_s:g}"
    if options.ttl_s is not None and options.ttl_s < 0:
        yield f"ttl_s must be 0 or more, not {options.ttl_s}"
    if any(not argv or not argv[0] for argv in options.setup):
        yield "setup: a command has no program"
    for key in ("image", "python"):
        value = getattr(options, key)
        if value is not None and not is_word(value):
            yield f"{key} must be one word, not {value!r}"
    if (options.python or "").startswith("~"):
        yield f"python: {options.python}: an image has no home directory. Write an absolute path"


def _name_problems(options: KubernetesOptions) -> Iterator[str]:
    if options.namespace is not None and not names.is_label(options.namespace):
        yield f"namespace must consist of lowercase letters, digits and hyphens (63 at most), not {options.namespace!r}"
    others = ("service_account", "priority_class", "code_claim", "queue", "queue_priority", "volcano_queue")
    for key in ("runtime", *others):
        value = getattr(options, key)
        if value is not None and not names.is_subdomain(value):
            yield f"{key} must be an object's name (lowercase letters, digits, hyphens, dots), not {value!r}"
    for value in options.image_pull_secrets:
        if not names.is_subdomain(value):
            yield f"image_pull_secrets: {value!r} is not the name of a Secret"


def _code_problems(options: KubernetesOptions) -> Iterator[str]:
    if options.code == "pvc" and options.code_claim is None:
        yield "code: pvc needs code_claim, a PersistentVolumeClaim for snapshots"
    if options.code == "store" and options.code_store is None:
        yield "code: store needs code_store, with its url (s3://bucket/prefix) and an image that has the command aws"
    if options.code == "auto" and options.code_claim is not None and options.code_store is not None:
        yield "code_claim and code_store are both set: remove one, or set code: pvc or code: store"
    if options.code_dir is not None and options.code != "image":
        yield "code_dir, the code's directory in the image, needs code: image"
    if options.code_dir is not None and not options.code_dir.startswith("/"):
        yield f"code_dir must begin with /, not {options.code_dir!r}"
    store = options.code_store
    if store is not None and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", store.url):
        yield f"code_store.url must be like s3://bucket/prefix, not {store.url!r}"
    if store is not None and not is_word(store.image):
        yield "code_store.image must name an image that has the command aws"
    if store is not None and store.endpoint is not None and not re.match(r"https?://[^/]", store.endpoint):
        yield f"code_store.endpoint must be like https://host:port, not {store.endpoint!r}"
    if store is not None and store.secret is not None and not names.is_subdomain(store.secret):
        yield f"code_store.secret: {store.secret!r} is not the name of a Secret"


def _label_problems(options: KubernetesOptions) -> Iterator[str]:
    for option, labels in (("labels", options.labels), ("node_selector", options.node_selector)):
        for key, value in labels.items():
            if not names.is_qualified(key):
                yield f"{option}: {key!r} is not a label's name"
            if not names.is_label_value(value):
                yield f"{option}: {value!r} of {key} is not a label's value (63 letters, digits, -, _ and . at most)"
    for key in options.annotations:
        if not names.is_qualified(key):
            yield f"annotations: {key!r} is not an annotation's name"
    for key in (*options.labels, *options.annotations):
        if key.startswith(names.PREFIX) or key in (names.MANAGED_BY, names.KUEUE_QUEUE, names.KUEUE_PRIORITY):
            yield f"accel sets {key} itself: leave it out" + (" (queue:)" if key == names.KUEUE_QUEUE else "")
    if options.gpu_label is not None and not names.is_qualified(options.gpu_label):
        yield f"gpu_label: {options.gpu_label!r} is not a label's name"
    for accelerator, labels in options.accelerators.items():
        if not labels:
            yield f"accelerators: {accelerator} has no node labels"
        for key, value in labels.items():
            if not names.is_qualified(key) or not names.is_label_value(value):
                yield f"accelerators: {accelerator}: {key}={value} is not a node label"


def _placement_problems(options: KubernetesOptions) -> Iterator[str]:
    for key, value in options.resources.items():
        if key in ("cpu", "memory") or key == gpu_resource(options):
            flag = {"cpu": "--cpus", "memory": "--memory"}.get(key, "--gpus")
            yield f"resources: {key} is set by {flag}: leave it out"
        if not names.is_qualified(key):
            yield f"resources: {key!r} is not the name of a resource"
        if isinstance(value, bool) or not _QUANTITY.match(str(value)):
            yield f"resources: {key} must be a quantity such as 1 or 100Gi, not {value!r}"
    if options.gpu_resource is not None and "/" not in options.gpu_resource:
        yield f"gpu_resource must be like nvidia.com/gpu, not {options.gpu_resource!r}"
    for toleration in options.tolerations:
        if toleration.operator == "Exists" and toleration.value is not None:
            yield f"tolerations: {toleration.key}: operator Exists takes no value"
        if toleration.key is None and (toleration.operator == "Equal" or toleration.value is not None):
            yield "tolerations: a value needs a key"
        if toleration.seconds is not None and toleration.effect != "NoExecute":
            yield f"tolerations: {toleration.key}: seconds needs effect: NoExecute"
    mounts: set[str] = set()
    for volume in options.volumes:
        yield from _volume_problems(volume, mounts)
        mounts.add(_mount_path(volume))


def _volume_problems(volume: Volume, mounts: set[str]) -> Iterator[str]:
    subject = f"volumes: {volume.mount}"
    sources = [key for key in _SOURCES if getattr(volume, key) is not None]
    if not volume.mount.startswith("/") or ":" in volume.mount or _mount_path(volume) == "/":
        yield f"volumes: mount must be a directory such as /data, not {volume.mount!r}"
    if _mount_path(volume) in _RESERVED_MOUNTS:
        advice = " (shm_gb in the job's resources sets its size)" if _mount_path(volume) == "/dev/shm" else ""
        yield f"{subject}: accel mounts something there itself{advice}"
    if _mount_path(volume) in mounts:
        yield f"{subject} is given twice"
    if len(sources) != 1:
        yield f"{subject} needs one of {', '.join(_SOURCES)}, and has {' and '.join(sources) or 'none'}"
    for key in ("claim", "config_map", "secret"):
        value = getattr(volume, key)
        if value is not None and not names.is_subdomain(value):
            yield f"{subject}: {key}: {value!r} is not the name of an object"
    if volume.nfs is not None and not re.fullmatch(r"[^:/]+:/.*", volume.nfs):
        yield f"{subject}: nfs must be like server:/path, not {volume.nfs!r}"
    if volume.source is not None and (len(volume.source) != 1 or "name" in volume.source):
        yield f"{subject}: source must be one volume source such as {{csi: {{driver: …}}}}"


def _mount_path(volume: Volume) -> str:
    return posixpath.normpath(f"/{volume.mount.lstrip('/')}")


def _slice_problems(options: KubernetesOptions) -> Iterator[str]:
    if options.slices < 1:
        yield f"slices must be 1 or more, not {options.slices}"
    if options.tpu_topology is None:
        if options.slices > 1:
            yield f"slices: {options.slices} needs tpu_topology, the topology of each slice"
        return
    if not _TOPOLOGY_FORM.fullmatch(options.tpu_topology):
        yield f"tpu_topology must be like 4x4 or 2x2x2, not {options.tpu_topology!r}"
    if options.gpu != "tpu":
        yield f"tpu_topology needs gpu: tpu, not {options.gpu}"
    if options.workload not in ("jobset", "job"):
        yield f"tpu_topology needs workload: jobset or job, not {options.workload}"
    if options.slices > 1 and options.workload != "jobset":
        yield f"slices: {options.slices} needs workload: jobset, not {options.workload}"
    for key, tpu_name in (("gpu_resource", TPU_RESOURCE), ("gpu_label", TPU_LABEL)):
        if getattr(options, key) is not None:
            yield f"{key}: slices always use {tpu_name}: leave it out"
    if TPU_TOPOLOGY in options.node_selector:
        yield f"node_selector: {TPU_TOPOLOGY} is set by tpu_topology: leave it out"


def _runtime_problems(options: KubernetesOptions) -> Iterator[str]:
    if options.runtime is None:
        return
    if options.workload != "trainjob":
        yield f"runtime: {options.runtime} needs workload: trainjob, not {options.workload}"
    if options.code != "image":
        yield "runtime needs code: image, since a TrainJob cannot add the init container that delivers code"
    for key in _SET_BY_RUNTIME:
        if getattr(options, key):
            yield f"{key}: a TrainJob cannot set it: leave it out, since the runtime {options.runtime} decides"


def _queue_problems(options: KubernetesOptions) -> Iterator[str]:
    if options.queue_priority is not None and options.queue is None:
        yield "queue_priority needs queue"
    if options.queue is not None and options.volcano_queue is not None:
        yield "queue (Kueue) and volcano_queue are both set: remove one"
    if options.workload == "trainjob" and options.ttl_s is not None:
        yield "ttl_s is not supported by TrainJobs: use another workload, or accel prune"


def _security_problems(options: KubernetesOptions) -> Iterator[str]:
    if options.pod_security != "privileged":
        advice = f"needs pod_security: privileged, not {options.pod_security}"
        for key in ("host_network", "ipc_lock"):
            if getattr(options, key):
                yield f"{key} {advice}"
        for volume in options.volumes:
            if volume.host_path is not None or "hostPath" in (volume.source or {}):
                yield f"volumes: {volume.mount}: a directory of the node {advice}"
    if options.read_only_root_filesystem and options.setup:
        yield "setup cannot install anything with read_only_root_filesystem: remove one"
    for key in ("run_as_user", "run_as_group", "fs_group"):
        value = getattr(options, key)
        if value is not None and not 0 <= value <= _MAX_ID:
            yield f"{key} must be 0 to {_MAX_ID}, not {value}"
    if options.run_as_user == 0 and options.pod_security == "restricted":
        yield "run_as_user: 0 is root, which pod_security: restricted forbids (baseline allows it)"
