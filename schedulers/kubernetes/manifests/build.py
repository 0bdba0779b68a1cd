"""The objects of a job, in their order of creation: pure functions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import object_names
from ...errors import SpecError
from ...job import JobSpec
from ...target import Plan
from .. import names, tpu_slices
from ..options import KubernetesOptions
from . import code_delivery as delivery
from . import pods, validate, workloads
from .code_delivery import Code, Object
from .workloads import BUILDERS

TARGET_KIND = "kubernetes"
GROUP_ANNOTATION = "scheduling.k8s.io/group-name"
POD_GROUP = "scheduling.volcano.sh/v1beta1"


@dataclass(frozen=True, kw_only=True)
class Manifests:
    """The objects of a job.

    first:    created before the job's object.
    workload: the job's object. It owns all others (`with_owner`), which are deleted with it.
    then:     needed by its pods, and created after it.
    """

    first: tuple[Object, ...]
    workload: Object
    then: tuple[Object, ...]

    def __iter__(self) -> Any:
        return iter((*self.first, self.workload, *self.then))


def build(
    spec: JobSpec,
    options: KubernetesOptions,
    job_id: str,
    code: Code,
    *,
    target: str = "kubernetes",
    data: bytes | None = None,
) -> Manifests:
    """Build the job's objects. `data`: the packed code, for ConfigMaps if `code.kind` is configmap.

    Applies the user's patches last. Raises SpecError for a job that cannot be of this kind.
    """
    check(spec, options, target)
    name, builder = object_names.object_name(spec.name, job_id), BUILDERS[options.workload]
    pod = template(spec, options, name, job_id, code, target)
    metadata = functools.partial(_metadata, spec, options, job_id)
    annotations = {**tpu_slices.placement_annotations(spec, options), **options.annotations}
    workload: Object = {
        "apiVersion": builder.api_version,
        "kind": builder.kind,
        "metadata": {
            **metadata(),
            "labels": {**names.labels(spec.name, job_id), **_queue_labels(options), **options.labels},
            **({"annotations": annotations} if annotations else {}),
        },
        "spec": builder.build_spec(spec, options, name, job_id, pod),
    }
    first: list[Object] = []
    then: list[Object] = []
    if options.workload == "trainjob" and options.runtime is None:
        first.append(workloads.training_runtime(spec, options, metadata(), pod))
    if pods.needs_rendezvous(spec):
        first.append(pods.rendezvous(options, metadata(), job_id))
    if options.has_pod_group:
        first.append(_pod_group(spec, options, metadata()))
    if options.workload == "job":
        then.append(pods.service(metadata(), job_id, {}, clusterIP="None"))
    if code.kind == "configmap" and data is not None:
        then += delivery.config_maps(name, names.labels(spec.name, job_id), options.namespace, data)
    if options.patch:
        workload = _patched(workload, options, f"target {target}: patch")
    return Manifests(first=tuple(first), workload=workload, then=tuple(then))


def check(spec: JobSpec, options: KubernetesOptions, target: str) -> None:
    """Raise SpecError for a job that cannot be of this kind."""
    pods.check(spec, options, target)
    validate.check_options(options, f"target {target}")
    if spec.max_nodes is not None and options.workload != "pytorchjob":
        raise SpecError(
            f"target {target}: --nodes {spec.nodes}:{spec.max_nodes}: only a PyTorchJob may grow, not workload "
            f"{options.workload}"
        )
    if options.runtime is not None and spec.retry.max_restarts:
        raise SpecError(
            f"target {target}: --max-restarts: a TrainJob cannot set it: leave it out, since the runtime "
            f"{options.runtime} decides"
        )


def warnings(spec: JobSpec, options: KubernetesOptions) -> tuple[str, ...]:
    """Return warnings about settings whose effect may surprise."""
    messages = []
    if spec.max_nodes is not None and not spec.retry.max_restarts:
        messages.append(
            f"--nodes {spec.nodes}:{spec.max_nodes} without --max-restarts: pods may join, but the loss of one "
            "(an eviction, a lost node, a failed rank) ends the job"
        )
    if spec.time_limit_s is not None and spec.retry.max_restarts:
        messages.append(BUILDERS[options.workload].time_limit.format(pods.backstop_s(spec)))
    messages += tpu_slices.warnings(options, pods.node_selector(spec, options))
    if spec.resources.memory_gb is None or spec.resources.cpus is None:
        messages.append("--cpus or --memory is not set: the cluster may overcommit the pods, or evict them first")
    return tuple(messages)


def plan(spec: JobSpec, options: KubernetesOptions, job_id: str, target: str) -> Plan:
    """Return the plan of a submit: the objects as YAML and the actions on them. Raises SpecError.

    Two things are unknown until the code is packed: its digest, and with `code: auto` the use of a claim or store.
    """
    code = delivery.plan_delivery(options)
    manifests = build(spec, options, job_id, code, target=target)
    documents = files(manifests)
    if code.kind == "pvc":
        documents["kubernetes/code-pod.yaml"] = to_yaml([loader_pod(spec, options, job_id, target)])
    return Plan(
        target=target,
        kind=TARGET_KIND,
        job_id=job_id,
        files=documents,
        actions=(*_actions(manifests, spec, options, code), _command(manifests, options)),
        settings={"spec": spec.to_json()},
        warnings=warnings(spec, options),
    )


def _actions(manifests: Manifests, spec: JobSpec, options: KubernetesOptions, code: Code) -> list[tuple[str, ...]]:
    name = str(manifests.workload["metadata"]["name"])
    fallback = f"claim {options.code_claim}" if options.code_claim else options.code_store and options.code_store.url
    actions: list[tuple[str, ...]] = []
    if code.kind == "pvc":
        via = f"through pod/{name}-loader"
        actions.append(("send", spec.code, "to", f"claim {options.code_claim}", via, "where it is lacking"))
    if code.kind == "store" and options.code_store:
        actions.append(("send", spec.code, "to", options.code_store.url, "where it is lacking"))
    actions += [("create", f"{str(manifest['kind']).lower()}/{manifest['metadata']['name']}") for manifest in manifests]
    if code.kind == "configmap":
        alternative = ("or, if it is more than 1 MiB, to", fallback) if options.code == "auto" and fallback else ()
        actions.append(("create", f"configmap/{name}-code-0", "out of", spec.code, *alternative))
    return actions


def _command(manifests: Manifests, options: KubernetesOptions) -> tuple[str, ...]:
    """Return the command that every pod runs."""
    trainer = manifests.workload["spec"].get("trainer") or {}
    if "command" in trainer:  # a TrainJob on a runtime of the cluster
        return tuple(argument.replace("$$", "$") for argument in (*trainer["command"], *trainer.get("args", ())))
    for manifest in manifests:
        for _, template in validate.templates(manifest):
            for container in template["spec"]["containers"]:
                if container["name"] == pods.container_name(options):
                    return tuple(argument.replace("$$", "$") for argument in container.get("command", ()))
    return ()


def with_digest(manifest: Object, spec: JobSpec | None = None) -> Object:
    """Return the object with its digest, which identifies it in later submits, and the spec for other machines."""
    metadata = manifest["metadata"]
    notes = {**(metadata.get("annotations") or {}), names.DIGEST: digest(manifest)}
    if spec is not None:
        notes[names.SPEC] = json.dumps(spec.to_json(), separators=(",", ":"))
    return {**manifest, "metadata": {**metadata, "annotations": notes}}


def digest(manifest: Mapping[str, Any]) -> str:
    """Return the digest of an object as it was built: equal objects have equal digests."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def with_owner(manifest: Object, workload: Mapping[str, Any]) -> Object:
    """Return the object with the created `workload` as its owner, so that they are deleted together."""
    metadata = workload["metadata"]
    reference = {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "blockOwnerDeletion": False,
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}


def files(manifests: Manifests) -> dict[str, str]:
    """Return file name -> YAML, one file per object. The names sort in the order of creation."""
    numbered = [(f"{index}-{manifest['kind'].lower()}", manifest) for index, manifest in enumerate(manifests)]
    return {f"kubernetes/{name}.yaml": to_yaml([manifest]) for name, manifest in numbered}


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return one YAML document per object, with keys in insertion order and multi-line strings as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # In other styles PyYAML does not escape U+0085, and would read it back as a line break.
        printable = value.replace("\n", "").isprintable()
        style = '"' if not printable else "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    texts = [
        yaml.dump(manifest, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=False)
        for manifest in objects
    ]
    return "---\n".join(texts)


def template(
    spec: JobSpec, options: KubernetesOptions, name: str, job_id: str, code: Code, target: str
) -> Callable[..., Object]:
    """Return a function that builds the patched pod template from the arguments of `pods.template` after `code`."""
    annotations = {GROUP_ANNOTATION: name} if options.has_pod_group else None
    unpatched = functools.partial(pods.template, spec, options, name, job_id, code, annotations=annotations)
    if not options.pod_patch:
        return unpatched
    subject = f"target {target}: pod_patch"

    def patched(**parameters: Any) -> Object:
        built = unpatched(**parameters)
        merged = validate.apply_patch(built, options.pod_patch, subject)
        validate.check_template(merged, subject)
        _finish_pod(merged, built, options, subject)
        return merged

    return patched


def _patched(workload: Object, options: KubernetesOptions, subject: str) -> Object:
    merged = validate.apply_patch(workload, options.patch, subject)
    validate.check_workload(merged, workload, subject)
    built = dict(validate.templates(workload))
    patched = dict(validate.templates(merged))
    for field_path in built | patched:
        _finish_pod(patched.get(field_path, {}), built.get(field_path), options, f"{subject}: {field_path}")
    return merged


def _finish_pod(template: Object, built: Mapping[str, Any] | None, options: KubernetesOptions, subject: str) -> None:
    """Check a patched pod template, and drop what its patch adds to a container that these pods do not have."""
    pod = template.get("spec") or {}
    names = [container["name"] for container in (built or {}).get("spec", {}).get("initContainers", [])]
    if options.code == "auto" and delivery.FETCH not in names and pod.get("initContainers"):
        # Only code that is too large for ConfigMaps is fetched, and its size is not known before it is packed.
        pod["initContainers"] = [added for added in pod["initContainers"] if added["name"] != delivery.FETCH]
    _check_pod(template, built, options, subject)


def _check_pod(
    template: Mapping[str, Any], built: Mapping[str, Any] | None, options: KubernetesOptions, subject: str
) -> None:
    """Check a patched pod template against the built one; None if the patch adds it. Raises SpecError."""
    pod, known = template.get("spec") or {}, (built or {}).get("spec") or {}
    name = pods.container_name(options)
    images = {container.get("name"): container.get("image") for container in pod.get("containers") or []}
    if built is not None and not images.get(name):
        raise SpecError(f"{subject}: the training container {name!r} and its image cannot be removed")
    if not images:
        raise SpecError(f"{subject}: accel creates no such pods, and new ones need containers")
    for key in ("containers", "initContainers"):
        names = [container["name"] for container in known.get(key) or []]
        for container in pod.get(key) or []:
            if container["name"] not in names and not container.get("image"):  # the API's models do not require it
                raise SpecError(
                    f"{subject}: spec.{key}: the pods have no {container['name']!r} (they have "
                    f"{', '.join(map(repr, names)) or 'none'}), and a new one needs an image"
                )
    if built is not None:
        validate.check_labels(template, built, subject, "pods")


def _metadata(spec: JobSpec, options: KubernetesOptions, job_id: str) -> Object:
    """Return the metadata of an object that belongs to the job."""
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": object_names.object_name(spec.name, job_id), **namespace, "labels": names.labels(spec.name, job_id)}


def _queue_labels(options: KubernetesOptions) -> dict[str, str]:
    labels = {names.KUEUE_QUEUE: options.queue, names.KUEUE_PRIORITY: options.queue_priority}
    return {key: value for key, value in labels.items() if value is not None}


def _pod_group(spec: JobSpec, options: KubernetesOptions, metadata: Object) -> Object:
    group: Object = {"minMember": spec.nodes, "queue": options.volcano_queue}
    if options.priority_class:
        group["priorityClassName"] = options.priority_class
    return {"apiVersion": POD_GROUP, "kind": "PodGroup", "metadata": metadata, "spec": group}


# The pod that uploads code to a claim: placed like the job's pods, with few resources.

_LIVES_S = 600
_CPUS, _MEMORY_GB = 1, 1.0
# Fields of the training pods that it does not need.
_NOT_ITS_OWN = ("initContainers", "resourceClaims", "schedulingGates")
_STORAGE = "ephemeral-storage"


def loader_pod(spec: JobSpec, options: KubernetesOptions, job_id: str, target: str) -> Object:
    """Build a pod that mounts the claim for writing and waits for an upload through exec.

    It ends by itself after ten minutes and is not in the job's gang. It has the nodes, tolerations, accounts,
    labels and image of the job's pods, and their `pod_patch`. Raises SpecError.
    """
    resources = spec.resources
    reduced = dataclasses.replace(
        resources,
        cpus=None if resources.cpus is None else min(_CPUS, resources.cpus),
        memory_gb=None if resources.memory_gb is None else min(_MEMORY_GB, resources.memory_gb),
    )
    name = object_names.object_name(spec.name, job_id)
    spec = dataclasses.replace(spec, resources=reduced)
    pod = template(spec, options, name, job_id, delivery.Code(kind="pvc"), target)()
    metadata, pod_spec = pod["metadata"], pod["spec"]
    notes = dict(metadata.get("annotations") or {})
    notes.pop(GROUP_ANNOTATION, None)
    loader_spec: Object = {
        **{key: value for key, value in pod_spec.items() if key not in _NOT_ITS_OWN},
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIVES_S,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [_container(pod_spec, options, target)],
        "volumes": [{"name": delivery.CODE_VOLUME, "persistentVolumeClaim": {"claimName": options.code_claim}}],
    }
    if options.volcano_queue:
        loader_spec.pop("schedulerName", None)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **_metadata(spec, options, job_id),
            "name": f"{name}-loader",
            "labels": metadata["labels"],
            **({"annotations": notes} if notes else {}),
        },
        "spec": loader_spec,
    }


def _container(pod_spec: Object, options: KubernetesOptions, target: str) -> Object:
    """Return the loader's container, a copy of the unpacking one: same interpreter, no devices."""
    containers = [
        container for container in pod_spec.get("initContainers") or [] if container.get("name") == delivery.CODE_VOLUME
    ]
    if not containers:
        raise SpecError(
            f"target {target}: pod_patch: the container {delivery.CODE_VOLUME!r} loads the code and cannot be removed"
        )
    loader_container: Object = {
        **containers[0],
        "name": "loader",
        "command": [options.python or "python3", "-c", f"import time; time.sleep({_LIVES_S})"],
        "volumeMounts": [{"name": delivery.CODE_VOLUME, "mountPath": delivery.PACKED}],
    }
    if _STORAGE in options.resources:  # a quota on it requires it of every pod
        amount = {_STORAGE: str(options.resources[_STORAGE])}
        resources = loader_container.get("resources") or {}
        loader_container["resources"] = {kind: {**resources.get(kind, {}), **amount} for kind in ("requests", "limits")}
    return loader_container


# The kinds that a cluster supports, by its API groups.

_VOLCANO = "scheduling.volcano.sh"
# The first version with a Job's `backoffLimitPerIndex`, without which its pods do not know their attempt.
_PER_INDEX = (1, 28)


def runnable(api_versions: Iterable[str]) -> list[str]:
    """Return the kinds that a cluster with these API versions (`batch/v1`, `kubeflow.org/v1`, …) supports."""
    available = set(api_versions)
    return [kind for kind, builder in BUILDERS.items() if builder.api_version in available]


def check_kind(options: KubernetesOptions, api_versions: Iterable[str], target: str) -> None:
    """Raise SpecError, which names the available kinds, if the cluster lacks the requested kind or Volcano."""
    available = set(api_versions)
    builder = BUILDERS[options.workload]
    if builder.api_version not in available:
        group = builder.api_version.partition("/")[0]
        group_versions = sorted(version for version in available if version.partition("/")[0] == group)
        runnable_kinds = runnable(available)
        detail = f"it has {', '.join(group_versions)}" if group_versions else f"{builder.installed_by} is not installed"
        remedy = (
            f"use workload: {' or '.join(runnable_kinds)}"
            if runnable_kinds
            else "no workload that accel supports is installed"
        )
        raise SpecError(f"target {target}: the cluster has no {builder.api_version} ({detail}); {remedy}")
    if options.has_pod_group and not any(version.partition("/")[0] == _VOLCANO for version in available):
        raise SpecError(f"target {target}: volcano_queue: the cluster has no {_VOLCANO}: Volcano is not installed")


def check_restarts(
    spec: JobSpec, options: KubernetesOptions, version: Callable[[], tuple[int, int] | None], target: str
) -> None:
    """Raise SpecError for a Job with restarts before Kubernetes 1.28. `version` is called for such a Job only."""
    if (
        options.workload == "job"
        and spec.retry.max_restarts
        and (cluster_version := version())
        and cluster_version < _PER_INDEX
    ):
        raise SpecError(
            f"target {target}: --max-restarts of workload job needs Kubernetes 1.28 (backoffLimitPerIndex), and the "
            f"cluster has {cluster_version[0]}.{cluster_version[1]}; use workload: jobset or pytorchjob"
        )
