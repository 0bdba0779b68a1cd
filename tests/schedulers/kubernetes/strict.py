"""Whether a manifest is what its API knows, and nothing else: unknown fields and wrong types are errors."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.needs import package

_CRD = Path(__file__).parent / "crds" / "kubeflow.org_pytorchjobs.v1.json"
_MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
VERSIONS = tuple(f"1.{minor}" for minor in range(25, 38))


def errors(made: Mapping[str, Any], version: str = "1.34") -> list[str]:
    """What is wrong with a manifest; skips the test where what would know is not installed."""
    kind = str(made["kind"])
    if kind == "PyTorchJob":
        return _by_schema(made) + _by_the_operator(made)
    if kind in _MODELS:
        return _by_models(made, _MODELS[kind])
    if kind == "PodGroup":
        return [] if set(made["spec"]) <= {"minMember", "queue", "priorityClassName"} else [str(made["spec"])]
    return by_kubernetes(made, version)


def by_kubernetes(made: Mapping[str, Any], version: str) -> list[str]:
    """What the schemas of this version of Kubernetes refuse in one of its own objects."""
    validate = _kubernetes_validate()
    try:
        validate.validate(dict(made), version, strict=True)
    except validate.ValidationError as error:
        return [f"{'/'.join(map(str, error.path))}: {error.message}"]
    return []


@functools.cache
def _kubernetes_validate() -> Any:
    """The package, made to keep what it has read: it would parse a file of megabytes for each object."""
    found = package("kubernetes_validate")
    found.utils.schema_contents = functools.lru_cache(16)(found.utils.schema_contents)
    return found


def _by_models(made: Mapping[str, Any], name: str) -> list[str]:
    models = package("kubeflow_trainer_api.models")
    from pydantic import ValidationError

    try:
        known = getattr(models, name).from_dict(dict(made))
    except ValidationError as error:
        return [str(error)]
    read = known.to_dict()
    return [] if read == made else [f"not kept: {path}" for path in _differences(made, read, "")]


def _differences(given: Any, kept: Any, path: str) -> list[str]:
    if isinstance(given, Mapping) and isinstance(kept, Mapping):
        return [d for key in given for d in _differences(given[key], kept.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [d for i, pair in enumerate(zip(given, kept, strict=True)) for d in _differences(*pair, f"{path}[{i}]")]
    return [] if given == kept else [path]


@functools.cache
def _validator() -> Callable[[Any], list[str]]:
    jsonschema = package("jsonschema")
    crd = json.loads(_CRD.read_text())
    schema = _strict(copy.deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]), root=True)
    made = jsonschema.Draft7Validator(schema)
    return lambda doc: [f"{'/'.join(map(str, e.path))}: {e.message[:200]}" for e in made.iter_errors(doc)]


def _by_schema(made: Mapping[str, Any]) -> list[str]:
    return _validator()(made)


def _strict(schema: Any, *, root: bool = False) -> Any:
    """A CRD's schema as an API server reads it with `fieldValidation=Strict`."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"], **{k: v for k, v in schema.items() if k == "pattern"}}
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if "properties" in schema:
        schema["properties"] = {key: _strict(value) for key, value in schema["properties"].items()}
        if root:
            known = ("name", "namespace", "labels", "annotations", "ownerReferences")
            metadata = {"type": "object", "required": ["name"], "additionalProperties": False}
            schema["properties"]["metadata"] = {**metadata, "properties": {key: {} for key in known}}
            schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for key in ("additionalProperties", "items"):
        schema[key] = _strict(schema[key]) if key in schema else None
        if schema[key] is None:
            del schema[key]
    return schema


def _by_the_operator(made: Mapping[str, Any]) -> list[str]:
    """What the training operator's webhook asks for beyond the schema."""
    found = []
    name, replicas = made["metadata"]["name"], made["spec"]["pytorchReplicaSpecs"]
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(f"{name}-worker-9999") > 63:
        found.append(f"name {name!r}")
    for role, replica in replicas.items():
        containers = replica["template"]["spec"]["containers"]
        if not any(each["name"] == "pytorch" and each.get("image") for each in containers):
            found.append(f"{role} has no container pytorch with an image")
        if role == "Master" and replica["replicas"] != 1:
            found.append("there must be one master")
    if "elasticPolicy" in made["spec"] and "Worker" not in replicas:
        found.append("an elasticPolicy needs workers")
    if "nProcPerNode" in made["spec"].get("elasticPolicy", {}) and "nprocPerNode" in made["spec"]:
        found.append("nprocPerNode twice")
    return found
