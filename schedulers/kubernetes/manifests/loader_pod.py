"""The pod that uploads code to a claim. It may run where the job's pods may, and uses few resources."""

from __future__ import annotations

import dataclasses

from ... import object_names
from ...errors import SpecError
from ...job import JobSpec
from ..options import KubernetesOptions
from . import build
from . import code_delivery as delivery
from .code_delivery import Object

_LIVES_S = 600
_CPUS, _MEMORY_GB = 1, 1.0
# What only pods that train need, beside their containers and volumes.
_NOT_ITS_OWN = ("initContainers", "resourceClaims", "schedulingGates")
_STORAGE = "ephemeral-storage"


def loader(spec: JobSpec, options: KubernetesOptions, job_id: str, target: str) -> Object:
    """Build a pod that mounts the claim for writing and waits for an upload through exec.

    It ends by itself after ten minutes and is not in the job's gang. It has the nodes, tolerations, accounts,
    labels and image of the job's pods, and their `pod_patch`. Raises SpecError.
    """
    wanted = spec.resources
    small = dataclasses.replace(
        wanted,
        cpus=None if wanted.cpus is None else min(_CPUS, wanted.cpus),
        memory_gb=None if wanted.memory_gb is None else min(_MEMORY_GB, wanted.memory_gb),
    )
    name = object_names.object_name(spec.name, job_id)
    spec = dataclasses.replace(spec, resources=small)
    template = build.template(spec, options, name, job_id, delivery.Code(kind="pvc"), target)()
    metadata, inside = template["metadata"], template["spec"]
    notes = dict(metadata.get("annotations") or {})
    notes.pop(build.GROUP_ANNOTATION, None)
    own: Object = {
        **{key: value for key, value in inside.items() if key not in _NOT_ITS_OWN},
        "restartPolicy": "Never",
        "activeDeadlineSeconds": _LIVES_S,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [_container(inside, options, target)],
        "volumes": [{"name": delivery.BRINGS, "persistentVolumeClaim": {"claimName": options.code_claim}}],
    }
    if options.volcano_queue:
        own.pop("schedulerName", None)
    place = {"namespace": options.namespace} if options.namespace else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-loader",
            **place,
            "labels": metadata["labels"],
            **({"annotations": notes} if notes else {}),
        },
        "spec": own,
    }


def _container(inside: Object, options: KubernetesOptions, target: str) -> Object:
    """Return the loader's container, a copy of the unpacking one: same interpreter, no devices."""
    found = [each for each in inside.get("initContainers") or [] if each.get("name") == delivery.BRINGS]
    if not found:
        raise SpecError(
            f"target {target}: pod_patch: the container {delivery.BRINGS!r}, which brings the code, must stay"
        )
    made: Object = {
        **found[0],
        "name": "loader",
        "command": [options.python or "python3", "-c", f"import time; time.sleep({_LIVES_S})"],
        "volumeMounts": [{"name": delivery.BRINGS, "mountPath": delivery.PACKED}],
    }
    if _STORAGE in options.resources:  # a quota that counts it wants to know it of every pod
        amount = {_STORAGE: str(options.resources[_STORAGE])}
        known = made.get("resources") or {}
        made["resources"] = {kind: {**known.get(kind, {}), **amount} for kind in ("requests", "limits")}
    return made
