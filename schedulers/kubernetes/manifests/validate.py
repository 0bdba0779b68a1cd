"""Apply a user's patch to a job's objects; validate it and raw Kubernetes options before any server is asked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from ...errors import ConfigError, SpecError, nearest
from .. import names
from ..options import KubernetesOptions

# A strategic merge patch, applied to what was built.
#
# The merge keys are those of the Kubernetes API (`x-kubernetes-patch-merge-key` in its OpenAPI), which a test
# compares; those of JobSet and Trainer are the keys of their lists (`x-kubernetes-list-map-keys`).
# https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/

# The name of a list -> what tells its elements apart. Every other list is replaced as a whole.
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


def apply_patch(base: Mapping[str, Any], patch: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `base` with the patch merged, as a new object; null deletes. Raises SpecError, prefixed with `where`."""
    merged = _map(dict(base), patch, where)
    if merged is None:
        raise SpecError(f"{where}: $patch: delete leaves nothing")
    return merged


def _map(base: dict[str, Any], patch: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    order = _order(patch, where)
    if order == "delete":
        return None
    wanted = {key: value for key, value in patch.items() if not key.startswith("$")}
    if order == "replace":
        return _plain_map(wanted, where)
    found = copy.deepcopy(base)
    retain = patch.get("$retainKeys")
    if retain is not None:
        found = {key: value for key, value in found.items() if key in _words(retain, f"{where}.$retainKeys")}
    for key, values in patch.items():
        if key.startswith(_FROM_LIST):
            name = key.removeprefix(_FROM_LIST)
            gone = _words(values, f"{where}.{key}")
            found[name] = [value for value in found.get(name, []) if value not in gone]
    for key, value in wanted.items():
        merged = _value(found.get(key), value, key, f"{where}.{key}")
        if merged is None:
            found.pop(key, None)
        else:
            found[key] = merged
    return found


def _value(base: Any, patch: Any, key: str, where: str) -> Any:
    if isinstance(patch, Mapping):
        return _map(base if isinstance(base, dict) else {}, patch, where)
    if isinstance(patch, Sequence) and not isinstance(patch, str):
        merge_key = MERGE_KEYS.get(key)
        if merge_key is None or not all(isinstance(each, Mapping) for each in patch):
            return _plain(list(patch), where)
        return _list(base if isinstance(base, list) else [], patch, _key_of(merge_key, patch, base), where)
    return patch


def _key_of(key: str, patch: Sequence[Mapping[str, Any]], base: Any) -> str:
    """Return the merge key: `port` for the ports of a Service, `containerPort` for those of a container."""
    elements = [*patch, *(base if isinstance(base, list) else [])]
    return "port" if key == "containerPort" and elements and all("port" in each for each in elements) else key


def _list(base: list[Any], patch: Sequence[Mapping[str, Any]], key: str, where: str) -> list[Any]:
    """Merge existing elements in place and append new ones."""
    if any(each.get("$patch") == "replace" and len(each) == 1 for each in patch):
        return [_plain_map(each, where) for each in patch if "$patch" not in each]
    found = copy.deepcopy(base)
    for element in patch:
        if key not in element:
            raise SpecError(f"{where}: an element has no {key}, which tells which one it is")
        inside = f"{where}[{element[key]}]"
        at = next((i for i, each in enumerate(found) if isinstance(each, dict) and each.get(key) == element[key]), None)
        merged = _map({} if at is None else found[at], element, inside)
        if at is None:
            found += [] if merged is None else [merged]
        else:
            found[at : at + 1] = [] if merged is None else [merged]
    return found


def _order(patch: Mapping[str, Any], where: str) -> str:
    for key in patch:
        if key.startswith("$") and not any(key == each or key.startswith(_FROM_LIST) for each in _DIRECTIVES):
            raise SpecError(f"{where}: no directive {key!r}{nearest(key, _DIRECTIVES)} ({', '.join(_DIRECTIVES)}NAME)")
    order = patch.get("$patch", "merge")
    if order not in _ORDERS:
        raise SpecError(f"{where}: $patch must be {', '.join(_ORDERS)}, not {order!r}")
    return str(order)


def _words(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SpecError(f"{where} must be a list, not {value!r}")
    return value


def _plain(value: Any, where: str) -> Any:
    """Return the value without nulls. Raises SpecError for a directive without effect."""
    if isinstance(value, Mapping):
        return _plain_map(value, where)
    if isinstance(value, list):
        return [_plain(inside, where) for inside in value]
    return value


def _plain_map(value: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in value:
        if key.startswith("$"):
            raise SpecError(f"{where}: {key} has nothing to act on here: what is around it is replaced as a whole")
    return {key: _plain(inside, f"{where}.{key}") for key, inside in value.items() if inside is not None}


# Validation.

# The keys of what is not a pod's template, by the path from the object's `spec`; `*` is any key, `[]` any element.
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


def check_workload(made: Mapping[str, Any], built: Mapping[str, Any], where: str) -> None:
    """Raise SpecError if the patched object is no longer the job's or has unknown fields.

    Its message begins with `where`. Raises ConfigError if the package with the models is not installed.
    """
    _same(made, built, where)
    kind = str(built["kind"])
    for path, keys in _KEYS.get(kind, {}).items():
        for place, value in _at(made.get("spec"), path.split(".") if path else [], "spec"):
            _refuse_unknown(value, keys.split(), f"{where}: {place}")
    if kind == "Job":
        _validate(made.get("spec"), "V1JobSpec", f"{where}: spec")
    for place, template in templates(made):
        check_template(template, f"{where}: {place}")


def check_template(template: Any, where: str) -> None:
    """Validate a pod template as `check_workload` does."""
    _validate(template, "V1PodTemplateSpec", where)


def check_options(options: KubernetesOptions, where: str) -> None:
    """Validate the options in Kubernetes' own syntax as `check_workload` does."""
    if options.affinity:
        _validate(options.affinity, "V1Affinity", f"{where}: affinity")
    for volume in options.volumes:
        if volume.source is not None:
            _validate({"name": "volume", **volume.source}, "V1Volume", f"{where}: volumes: {volume.mount}: source")


def templates(made: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each pod template in an object of any kind, with its path."""
    spec = made.get("spec") or {}
    if made["kind"] == "PyTorchJob":
        for role, replica in (spec.get("pytorchReplicaSpecs") or {}).items():
            yield f"spec.pytorchReplicaSpecs.{role}.template", replica.get("template") or {}
    elif made["kind"] == "Job":
        yield "spec.template", spec.get("template") or {}
    elif made["kind"] in ("JobSet", "TrainingRuntime"):
        inside = spec if made["kind"] == "JobSet" else (spec.get("template") or {}).get("spec") or {}
        for index, job in enumerate(inside.get("replicatedJobs") or []):
            template = ((job.get("template") or {}).get("spec") or {}).get("template") or {}
            yield f"replicatedJobs[{index}].template.spec.template", template


def _same(made: Mapping[str, Any], built: Mapping[str, Any], where: str) -> None:
    for key in ("apiVersion", "kind"):
        if made.get(key) != built[key]:
            raise SpecError(f"{where}: {key} cannot be changed")
    metadata = made.get("metadata") or {}
    for key in ("name", "namespace"):
        if metadata.get(key) != built["metadata"].get(key):
            raise SpecError(f"{where}: metadata.{key} cannot be changed: the job is found by it")
    own = {key: value for key, value in built["metadata"]["labels"].items() if key.startswith(names.OWN)}
    if not own.items() <= (metadata.get("labels") or {}).items():
        raise SpecError(f"{where}: metadata.labels: {', '.join(own)} cannot be changed: the job is found by them")


def _at(value: Any, steps: list[str], place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not steps:
        if isinstance(value, Mapping):
            yield place, value
        return
    step, *rest = steps
    if step == "[]" and isinstance(value, list):
        for index, inside in enumerate(value):
            yield from _at(inside, rest, f"{place}[{index}]")
    elif isinstance(value, Mapping):
        for key in value if step == "*" else [step]:
            yield from _at(value.get(key), rest, f"{place}.{key}")


def _refuse_unknown(value: Mapping[str, Any], keys: list[str], place: str) -> None:
    for key in value:
        if key not in keys:
            raise SpecError(f"{place}: unknown key {key!r}{nearest(key, keys)} (keys: {', '.join(keys)})")


def _validate(value: Any, model: str, where: str) -> None:
    """Validate with the models of Kubernetes' own client, which has them since version 37."""
    import importlib

    try:
        client = importlib.import_module("kubernetes.client")
        from pydantic import BaseModel, ValidationError
    except ImportError as error:
        raise ConfigError(f"{where}: {error.name} is not installed: pip install 'accel-launch[kubernetes]'") from None
    known = getattr(client, model)
    if not issubclass(known, BaseModel):
        raise ConfigError(f"{where}: it is checked by kubernetes 37 or later: pip install -U kubernetes")
    _refuse_misnamed(value, known, where)
    try:
        known.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f".{step}" for step in first["loc"])
        raise SpecError(f"{where}{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _refuse_misnamed(value: Any, kind: Any, where: str) -> None:
    """Raise SpecError for unknown keys, such as the Python client's (`node_selector`), which the models accept."""
    if isinstance(value, list):
        for index, inside in enumerate(value):
            _refuse_misnamed(inside, kind, f"{where}[{index}]")
    model = next((each for each in _types(kind) if hasattr(each, "model_fields")), None)
    if model is None or not isinstance(value, Mapping):
        return
    known = {field.serialization_alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, inside in value.items():
        if key not in known:
            advice = nearest(str(key), known) or f" (keys: {', '.join(known)})"
            raise SpecError(f"{where}.{key}: unknown key{advice}")
        _refuse_misnamed(inside, known[key], f"{where}.{key}")


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types in an annotation: `X` and `None` for `list[X] | None`."""
    inside = get_args(annotation)
    if not inside:
        yield annotation
    for each in inside:
        yield from _types(each)
