"""The kinds of objects that a Kubernetes cluster of the tests knows beside the server's own.

PyTorchJob's definition is upstream's. Those of JobSet, TrainJob and TrainingRuntime say the fields, types and limits of
which a job makes use, and take any pod template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from .client import Object

INSTALLED = ("pytorchjob", "jobset", "trainjob")
_PYTORCHJOB = Path(__file__).parents[2] / "schedulers/kubernetes/crds/kubeflow.org_pytorchjobs.v1.json"

_TEXT: Object = {"type": "string"}
_COUNT: Object = {"type": "integer", "format": "int32", "minimum": 0}
_SECONDS: Object = {"type": "integer", "format": "int64", "minimum": 1}
_FLAG: Object = {"type": "boolean"}
_OPEN: Object = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_NAMES: Object = {"type": "array", "items": _TEXT}


def _of(required: str = "", **properties: Object) -> Object:
    words = required.split()
    return {"type": "object", "properties": properties, **({"required": words} if words else {})}


def _list(item: Object) -> Object:
    return {"type": "array", "items": item}


def _one_of(*words: str) -> Object:
    return {"type": "string", "enum": list(words)}


_ENV = _list(_of("name", name=_TEXT, value=_TEXT, valueFrom=_OPEN))
_POD_TEMPLATE = _of("spec", metadata=_OPEN, spec=_OPEN)
_RULE = _of(
    "action",
    action=_one_of("FailJob", "FailIndex", "Ignore", "Count"),
    onExitCodes=_of("operator values", containerName=_TEXT, operator=_one_of("In", "NotIn"), values=_list(_COUNT)),
    onPodConditions=_list(_of("type status", type=_TEXT, status=_TEXT)),
)
_JOB_SPEC = _of(
    "template",
    activeDeadlineSeconds=_SECONDS,
    backoffLimit=_COUNT,
    backoffLimitPerIndex=_COUNT,
    completionMode=_one_of("NonIndexed", "Indexed"),
    completions=_COUNT,
    manualSelector=_FLAG,
    maxFailedIndexes=_COUNT,
    parallelism=_COUNT,
    podFailurePolicy=_of("rules", rules=_list(_RULE)),
    podReplacementPolicy=_one_of("TerminatingOrFailed", "Failed"),
    selector=_OPEN,
    suspend=_FLAG,
    template=_POD_TEMPLATE,
    ttlSecondsAfterFinished=_COUNT,
)
_JOBSET_SPEC = _of(
    failurePolicy=_of(
        maxRestarts=_COUNT,
        restartStrategy=_one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
        rules=_list(
            _of("action name", name=_TEXT, action=_TEXT, onJobFailureReasons=_NAMES, targetReplicatedJobs=_NAMES)
        ),
    ),
    network=_of(enableDNSHostnames=_FLAG, publishNotReadyAddresses=_FLAG, subdomain=_TEXT),
    replicatedJobs=_list(
        _of("name template", name=_TEXT, replicas=_COUNT, template=_of(metadata=_OPEN, spec=_JOB_SPEC)),
    ),
    startupPolicy=_OPEN,
    successPolicy=_OPEN,
    suspend=_FLAG,
    ttlSecondsAfterFinished=_COUNT,
    managedBy=_TEXT,
    coordinator=_OPEN,
)
_TRAINJOB_SPEC = _of(
    "runtimeRef",
    activeDeadlineSeconds=_SECONDS,
    initializer=_OPEN,
    managedBy=_TEXT,
    runtimePatches=_list(_OPEN),
    runtimeRef=_of("name", apiGroup=_TEXT, kind=_TEXT, name=_TEXT),
    suspend=_FLAG,
    trainer=_of(
        args=_NAMES,
        command=_NAMES,
        env=_ENV,
        image=_TEXT,
        numNodes=_COUNT,
        numProcPerNode=_COUNT,
        resourcesPerNode=_OPEN,
    ),
)
_RUNTIME_SPEC = _of(
    "template",
    mlPolicy=_of(numNodes=_COUNT, torch=_OPEN, mpi=_OPEN),
    podGroupPolicy=_of(coscheduling=_OPEN, volcano=_OPEN),
    template=_of("spec", metadata=_of(labels=_OPEN, annotations=_OPEN), spec=_JOBSET_SPEC),
)


def _definition(group: str, version: str, kind: str, plural: str, spec: Object) -> Object:
    schema = _of(apiVersion=_TEXT, kind=_TEXT, metadata={"type": "object"}, spec=spec, status=_OPEN)
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": schema},
    }
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }


def definitions(name: str) -> list[Object]:
    """Those that come with one operator of `INSTALLED`."""
    if name == "pytorchjob":
        found: Object = json.loads(_PYTORCHJOB.read_text())
        return [found]
    if name == "jobset":
        return [_definition("jobset.x-k8s.io", "v1alpha2", "JobSet", "jobsets", _JOBSET_SPEC)]
    if name == "trainjob":
        group, version = "trainer.kubeflow.org", "v1alpha1"
        return [
            _definition(group, version, "TrainJob", "trainjobs", _TRAINJOB_SPEC),
            _definition(group, version, "TrainingRuntime", "trainingruntimes", _RUNTIME_SPEC),
        ]
    raise ValueError(f"no kind {name!r}: there are {', '.join(INSTALLED)}")


def established(definition: Mapping[str, object]) -> bool:
    status = definition.get("status")
    conditions = status.get("conditions") or [] if isinstance(status, Mapping) else []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
