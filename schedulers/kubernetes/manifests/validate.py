"""Apply the user's patches to a job's objects, and validate them and raw Kubernetes options offline."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from ...errors import ConfigError, SpecError, nearest
from .. import names
from ..options import KubernetesOptions

# Strategic merge patches.
#
# The merge keys are those of the Kubernetes API (`x-kubernetes-patch-merge-key` in its OpenAPI), which a test
# compares; those of JobSet and Trainer are the keys of their lists (`x-kubernetes-list-map-keys`).
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/

# The name of a list -> the key that identifies its elements. Other lists are replaced as a whole.
MERGE_KEYS: Mapping[str, str] = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "ports": "containerPort",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "evictionResponders": "name",
    "topologySpreadConstraints": "topologyKey",
    "ownerReferences": "uid",
    "replicatedJobs": "name",
    "runtimePatches": "manager",
}
_FROM_LIST = "$deleteFromPrimitiveList/"
_DIRECTIVES = ("$patch", "$retainKeys", _FROM_LIST)
_ORDERS = ("replace", "delete", "merge")


def apply_patch(base: Mapping[str, Any], patch: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Return `base` with the patch merged, as a new object; null deletes. Raises SpecError, prefixed with `subject`."""
    merged = _map(dict(base), patch, subject)
    if merged is None:
        raise SpecError(f"{subject}: $patch: delete leaves nothing")
    return merged


def _map(base: dict[str, Any], patch: Mapping[str, Any], subject: str) -> dict[str, Any] | None:
    order = _order(patch, subject)
    if order == "delete":
        return None
    fields = {key: value for key, value in patch.items() if not key.startswith("$")}
    if order == "replace":
        return dict(_plain(fields, subject))
    patched = copy.deepcopy(base)
    retain = patch.get("$retainKeys")
    if retain is not None:
        patched = {
            key: value for key, value in patched.items() if key in _checked_list(retain, f"{subject}.$retainKeys")
        }
    for key, values in patch.items():
        if key.startswith(_FROM_LIST):
            name = key.removeprefix(_FROM_LIST)
            deleted = _checked_list(values, f"{subject}.{key}")
            patched[name] = [value for value in patched.get(name, []) if value not in deleted]
    for key, value in fields.items():
        merged = _value(patched.get(key), value, key, f"{subject}.{key}")
        if merged is None:
            patched.pop(key, None)
        else:
            patched[key] = merged
    return patched


def _value(base: Any, patch: Any, key: str, subject: str) -> Any:
    if isinstance(patch, Mapping):
        return _map(base if isinstance(base, dict) else {}, patch, subject)
    if isinstance(patch, Sequence) and not isinstance(patch, str):
        merge_key = MERGE_KEYS.get(key)
        if merge_key is None or not all(isinstance(element, Mapping) for element in patch):
            return _plain(list(patch), subject)
        return _list(base if isinstance(base, list) else [], patch, _key_of(merge_key, patch, base), subject)
    return patch


def _key_of(key: str, patch: Sequence[Mapping[str, Any]], base: Any) -> str:
    """Return the merge key: `port` for the ports of a Service, `containerPort` for those of a container."""
    elements = [*patch, *(base if isinstance(base, list) else [])]
    return "port" if key == "containerPort" and elements and all("port" in element for element in elements) else key


def _list(base: list[Any], patch: Sequence[Mapping[str, Any]], key: str, subject: str) -> list[Any]:
    """Merge existing elements in place and append new ones."""
    if any(entry.get("$patch") == "replace" and len(entry) == 1 for entry in patch):
        return [_plain(entry, subject) for entry in patch if "$patch" not in entry]
    patched = copy.deepcopy(base)
    for element in patch:
        if key not in element:
            raise SpecError(f"{subject}: an element has no {key}, which identifies it")
        element_subject = f"{subject}[{element[key]}]"
        index = next(
            (i for i, entry in enumerate(patched) if isinstance(entry, dict) and entry.get(key) == element[key]), None
        )
        merged = _map({} if index is None else patched[index], element, element_subject)
        if index is None:
            patched += [] if merged is None else [merged]
        else:
            patched[index : index + 1] = [] if merged is None else [merged]
    return patched


def _order(patch: Mapping[str, Any], subject: str) -> str:
    for key in patch:
        if key.startswith("$") and not any(key == directive or key.startswith(_FROM_LIST) for directive in _DIRECTIVES):
            raise SpecError(
                f"{subject}: unknown directive {key!r}{nearest(key, _DIRECTIVES)} ({', '.join(_DIRECTIVES)}NAME)"
            )
    order = patch.get("$patch", "merge")
    if order not in _ORDERS:
        raise SpecError(f"{subject}: $patch must be {', '.join(_ORDERS)}, not {order!r}")
    return str(order)


def _checked_list(value: Any, subject: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SpecError(f"{subject} must be a list, not {value!r}")
    return value


def _plain(value: Any, subject: str) -> Any:
    """Return the value without nulls. Raises SpecError for a directive without effect."""
    if isinstance(value, list):
        return [_plain(child, subject) for child in value]
    if not isinstance(value, Mapping):
        return value
    for key in value:
        if key.startswith("$"):
            raise SpecError(f"{subject}: {key} has no effect here: its parent is replaced as a whole")
    return {key: _plain(child, f"{subject}.{key}") for key, child in value.items() if child is not None}


# Validation.

# The valid keys outside of pod templates, by path from the object's `spec`; `*` is any key, `[]` any element.
_JOBSET = {
    "": "replicatedJobs network successPolicy failurePolicy startupPolicy suspend coordinator managedBy "
    "ttlSecondsAfterFinished volumeClaimPolicies",
    "network": "enableDNSHostnames subdomain publishNotReadyAddresses",
    "failurePolicy": "maxRestarts restartStrategy rules",
    "failurePolicy.rules.[]": "name action onJobFailureReasons targetReplicatedJobs",
    "replicatedJobs.[]": "name groupName template replicas dependsOn",
}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "PyTorchJob": {
        "": "elasticPolicy nprocPerNode pytorchReplicaSpecs runPolicy",
        "runPolicy": "activeDeadlineSeconds backoffLimit cleanPodPolicy managedBy schedulingPolicy suspend "
        "ttlSecondsAfterFinished",
        "runPolicy.schedulingPolicy": "minAvailable minResources priorityClass queue scheduleTimeoutSeconds",
        "elasticPolicy": "maxReplicas maxRestarts metrics minReplicas nProcPerNode rdzvBackend rdzvConf rdzvHost "
        "rdzvId rdzvPort standalone",
        "pytorchReplicaSpecs": "Master Worker",
        "pytorchReplicaSpecs.*": "replicas restartPolicy template",
    },
    "JobSet": _JOBSET,
    "TrainJob": {
        "": "activeDeadlineSeconds initializer managedBy runtimePatches runtimeRef suspend trainer",
        "trainer": "args command env image numNodes numProcPerNode resourcesPerNode",
        "runtimeRef": "apiGroup kind name",
    },
    "TrainingRuntime": {
        "": "mlPolicy podGroupPolicy template",
        **{f"template.spec.{path}".rstrip("."): keys for path, keys in _JOBSET.items()},
    },
    "Job": {},
}


def check_workload(patched: Mapping[str, Any], built: Mapping[str, Any], subject: str) -> None:
    """Raise SpecError if the patched object is no longer the job's or has unknown fields.

    Its message begins with `subject`. Raises ConfigError if the package with the models is not installed.
    """
    _check_identity(patched, built, subject)
    kind = str(built["kind"])
    for path, keys in _KEYS.get(kind, {}).items():
        for field_path, value in _at(patched.get("spec"), path.split(".") if path else [], "spec"):
            _refuse_unknown(value, keys.split(), f"{subject}: {field_path}")
    if kind == "Job":
        _validate(patched.get("spec"), "V1JobSpec", f"{subject}: spec")
    for field_path, template in templates(patched):
        check_template(template, f"{subject}: {field_path}")


def check_template(template: Any, subject: str) -> None:
    """Validate a pod template as `check_workload` does."""
    _validate(template, "V1PodTemplateSpec", subject)


def check_options(options: KubernetesOptions, subject: str) -> None:
    """Validate the options in Kubernetes' own syntax as `check_workload` does."""
    if options.affinity:
        _validate(options.affinity, "V1Affinity", f"{subject}: affinity")
    for volume in options.volumes:
        if volume.source is not None:
            _validate({"name": "volume", **volume.source}, "V1Volume", f"{subject}: volumes: {volume.mount}: source")


def templates(manifest: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each pod template in an object of any kind, with its path."""
    spec = manifest.get("spec") or {}
    if manifest["kind"] == "PyTorchJob":
        for role, replica in (spec.get("pytorchReplicaSpecs") or {}).items():
            yield f"spec.pytorchReplicaSpecs.{role}.template", replica.get("template") or {}
    elif manifest["kind"] == "Job":
        yield "spec.template", spec.get("template") or {}
    elif manifest["kind"] in ("JobSet", "TrainingRuntime"):
        jobset_spec = spec if manifest["kind"] == "JobSet" else (spec.get("template") or {}).get("spec") or {}
        for index, job in enumerate(jobset_spec.get("replicatedJobs") or []):
            template = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
            yield f"replicatedJobs[{index}].template.spec.template", template


def _check_identity(patched: Mapping[str, Any], built: Mapping[str, Any], subject: str) -> None:
    for key in ("apiVersion", "kind"):
        if patched.get(key) != built[key]:
            raise SpecError(f"{subject}: {key} cannot be changed")
    if built["kind"] == "TrainJob" and (patched.get("spec") or {}).get("runtimeRef") != built["spec"]["runtimeRef"]:
        raise SpecError(f"{subject}: spec.runtimeRef cannot be changed: set `runtime: NAME` in the target instead")
    metadata = patched.get("metadata") or {}
    for key in ("name", "namespace"):
        if metadata.get(key) != built["metadata"].get(key):
            raise SpecError(f"{subject}: metadata.{key} cannot be changed: accel finds the job by it")
    check_labels(patched, built, subject, "job")


def check_labels(patched: Mapping[str, Any], built: Mapping[str, Any], subject: str, selected: str) -> None:
    """Raise SpecError if the patched object lacks a label by which accel selects it."""
    labels = (patched.get("metadata") or {}).get("labels") or {}
    own_labels = {key: value for key, value in built["metadata"]["labels"].items() if key.startswith(names.PREFIX)}
    if not own_labels.items() <= labels.items():
        reason = f"accel selects the {selected} by them"
        raise SpecError(f"{subject}: metadata.labels: {', '.join(own_labels)} cannot be changed: {reason}")


def _at(value: Any, steps: list[str], field_path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not steps:
        if isinstance(value, Mapping):
            yield field_path, value
        return
    step, *rest = steps
    if step == "[]" and isinstance(value, list):
        for index, child in enumerate(value):
            yield from _at(child, rest, f"{field_path}[{index}]")
    elif isinstance(value, Mapping):
        for key in value if step == "*" else [step]:
            yield from _at(value.get(key), rest, f"{field_path}.{key}")


def _refuse_unknown(value: Mapping[str, Any], keys: list[str], field_path: str) -> None:
    for key in value:
        if key not in keys:
            raise SpecError(f"{field_path}: unknown key {key!r}{nearest(key, keys)} (keys: {', '.join(keys)})")


def _validate(value: Any, model: str, subject: str) -> None:
    """Validate with the models of the official client, which has them since version 37."""
    import importlib

    try:
        client = importlib.import_module("kubernetes.client")
        from pydantic import BaseModel, ValidationError
    except ImportError as error:
        raise ConfigError(f"{subject}: {error.name} is not installed: pip install 'accel-launch[kubernetes]'") from None
    model_class = getattr(client, model)
    if not issubclass(model_class, BaseModel):
        raise ConfigError(f"{subject}: its validation needs kubernetes 37 or later: pip install -U kubernetes")
    _refuse_misnamed(value, model_class, subject)
    try:
        model_class.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        field_path = "".join(f".{step}" for step in first["loc"])
        raise SpecError(f"{subject}{field_path}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _refuse_misnamed(value: Any, kind: Any, subject: str) -> None:
    """Raise SpecError for unknown keys, such as the Python client's (`node_selector`), which the models accept."""
    if isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_misnamed(child, kind, f"{subject}[{index}]")
    model = next((candidate for candidate in _types(kind) if hasattr(candidate, "model_fields")), None)
    if model is None or not isinstance(value, Mapping):
        return
    fields = {field.serialization_alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, child in value.items():
        if key not in fields:
            advice = nearest(str(key), fields) or f" (keys: {', '.join(fields)})"
            raise SpecError(f"{subject}.{key}: unknown key{advice}")
        _refuse_misnamed(child, fields[key], f"{subject}.{key}")


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation: `X` and `None` for `list[X] | None`."""
    type_arguments = get_args(annotation)
    if not type_arguments:
        yield annotation
    for type_argument in type_arguments:
        yield from _types(type_argument)
