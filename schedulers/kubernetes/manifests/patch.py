"""Strategic merge patches of the built objects.

The merge keys are those of the Kubernetes API (`x-kubernetes-patch-merge-key` in its OpenAPI), which a test
compares; those of JobSet and Trainer are the keys of their lists (`x-kubernetes-list-map-keys`).
https://kubernetes.io/docs/tasks/manage-kubernetes-objects/update-api-object-kubectl-patch/
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import SpecError, nearest

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


def apply(base: Mapping[str, Any], patch: Mapping[str, Any], where: str) -> dict[str, Any]:
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
