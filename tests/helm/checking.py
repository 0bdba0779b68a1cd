"""Whether objects are what Kubernetes, of several versions, would take; offline."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..schedulers.kubernetes import strict
from .helms import Manifest

# The least version that accel speaks to, and the newest whose schemas are to be had.
VERSIONS = ("1.25", "1.37")

# Groups of operators; whoever makes such an object has a test of his own for it.
FOREIGN = {"kubeflow.org", "jobset.x-k8s.io", "trainer.kubeflow.org", "kueue.x-k8s.io", "scheduling.volcano.sh"}


# What versions before 1.28 do not know: their API servers leave it out, and their schemas refuse it.
NEWER = {"Job": ("backoffLimitPerIndex", "maxFailedIndexes")}


def without_newer(manifest: Manifest) -> Manifest:
    """The object, from which is taken what the least version does not know."""
    for key in NEWER.get(manifest["kind"], ()):
        manifest["spec"].pop(key, None)
    return manifest


def group(manifest: Manifest) -> str:
    return str(manifest["apiVersion"].rpartition("/")[0])


def complaints(manifests: list[Manifest]) -> list[str]:
    """A line for everything that an API server of these versions would refuse; operators' objects are left out."""
    found = []
    for manifest in (m for m in manifests if group(m) not in FOREIGN):
        for version in VERSIONS:
            known = without_newer(copy.deepcopy(manifest)) if version == VERSIONS[0] else manifest
            for line in strict.by_kubernetes(known, version):
                found.append(f"{manifest['kind']} {manifest['metadata']['name']}: {line} ({version})")
    return found


def pods(manifests: list[Manifest]) -> list[Mapping[str, Any]]:
    """The spec of every pod that these objects are, or make."""
    found: list[Mapping[str, Any]] = []

    def search(value: object) -> None:
        if isinstance(value, dict):
            if "containers" in value:
                found.append(value)
            for inner in value.values():
                search(inner)
        elif isinstance(value, list):
            for inner in value:
                search(inner)

    search([m for m in manifests if m["kind"] != "ConfigMap"])
    return found


def unrestricted(pod: Mapping[str, Any]) -> list[str]:
    """What of a pod the *restricted* Pod Security Standard forbids."""
    wrong = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    security = pod.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        wrong.append("may run as root")
    if security.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
        wrong.append("no seccomp profile")
    wrong += [f"a hostPath volume {v['name']}" for v in pod.get("volumes", []) if "hostPath" in v]
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            wrong.append(f"{container['name']} may gain privileges")
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"}:
            wrong.append(f"{container['name']} has capabilities")
    return wrong
