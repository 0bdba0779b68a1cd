"""A build inside a cluster without a local builder: a kaniko Job, and ConfigMaps that hold the context.

kaniko's flags: https://github.com/GoogleContainerTools/kaniko#additional-flags
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from dataclasses import dataclass
from typing import Any

from schedulers.errors import SpecError
from schedulers.kubernetes import names
from schedulers.kubernetes.manifests import code_delivery as delivery
from schedulers.kubernetes.manifests.pods import unexpanded

from .builders import Build, repository

# etcd holds a few ConfigMaps easily; it is not made for more.
MAX_CONTEXT_BYTES = 3 << 20
_CONTEXT, _PARTS = "/accel/context", "/accel-parts"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster's settings for a build.

    image:  kaniko's, as the cluster can pull it.
    python: any image with python3, which unpacks the context.
    secret: the registry's, of type kubernetes.io/dockerconfigjson.
    """

    image: str
    python: str
    namespace: str | None = None
    secret: str | None = None


def object_name(build: Build, context: bytes) -> str:
    """Return the name of the objects that build this context; its ConfigMaps have it in a label too."""
    return f"accel-image-{_slug(build.tag)}-{delivery.digest_of(context)[:8]}"


def pack_context(build: Build) -> bytes:
    """Return the packed context. Raises SpecError if it is too large."""
    archive = gzip.compress(_tar(build), mtime=0)
    if len(archive) > MAX_CONTEXT_BYTES:
        raise SpecError(
            f"the packed context is {len(archive) / (1 << 20):.1f} MiB; kaniko takes {MAX_CONTEXT_BYTES >> 20} MiB: "
            "leave out what the image does not need (.gitignore, .accelignore), or --no-code, or use another builder"
        )
    return archive


def objects(build: Build, cluster: Cluster, context: bytes) -> list[delivery.Object]:
    """Return the ConfigMaps with the context and the Job that builds it.

    The digest is the pod's termination message (`terminated.message`).
    """
    name = object_name(build, context)
    labels = {names.MANAGED_BY: "accel", "app.kubernetes.io/component": "image"}
    # Created before the Job, which therefore cannot own them; a cleanup finds them by the label.
    maps = delivery.config_maps(name, {**labels, names.JOB_ID: name}, cluster.namespace, context)
    namespace = {"namespace": cluster.namespace} if cluster.namespace else {}
    pod = _pod(build, cluster, name, delivery.digest_of(context), maps)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, **namespace, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": 3600,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return [*maps, job]


def _pod(build: Build, cluster: Cluster, name: str, digest: str, maps: list[delivery.Object]) -> dict[str, Any]:
    parts = [f"{_PARTS}/{key}" for config_map in maps for key in config_map["binaryData"]]
    unpack = ["python3", "-c", delivery.UNPACK, digest, _CONTEXT, *parts]
    work_mount = {"name": "accel", "mountPath": "/accel"}
    mounts: list[dict[str, Any]] = [work_mount]
    sources = [{"configMap": {"name": config_map["metadata"]["name"]}} for config_map in maps]
    volumes: list[dict[str, Any]] = [
        {"name": "accel", "emptyDir": {}},
        {"name": "accel-parts", "projected": {"sources": sources}},
    ]
    if cluster.secret is not None:
        item = {"key": ".dockerconfigjson", "path": "config.json"}
        volumes.append({"name": "registry", "secret": {"secretName": cluster.secret, "items": [item]}})
        mounts.append({"name": "registry", "mountPath": "/kaniko/.docker", "readOnly": True})
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "initContainers": [
            {
                "name": "context",
                "image": cluster.python,
                "command": [unexpanded(argument) for argument in unpack],
                "volumeMounts": [work_mount, {"name": "accel-parts", "mountPath": _PARTS, "readOnly": True}],
            }
        ],
        "containers": [
            {
                "name": "kaniko",
                "image": cluster.image,
                "args": [unexpanded(argument) for argument in _kaniko_args(build)],
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _kaniko_args(build: Build) -> list[str]:
    options = [f"--context=dir://{_CONTEXT}", f"--dockerfile={_CONTEXT}/Dockerfile", f"--destination={build.tag}"]
    options += ["--digest-file=/dev/termination-log"]
    if build.epoch is not None:
        options += ["--reproducible", f"--build-arg=SOURCE_DATE_EPOCH={build.epoch}"]
    options += [f"--build-arg={key}={value}" for key, value in build.arguments.items()]
    options += [f"--label={key}={value}" for key, value in build.labels.items()]
    return [*options, *build.extra_flags]


def _tar(build: Build) -> bytes:
    """Return the context as a tar file; the same bytes for the same files."""

    def normalize(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = build.epoch or 0
        return member

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(build.context, arcname=".", filter=normalize)
    return buffer.getvalue()


def _slug(tag: str) -> str:
    last = repository(tag).rpartition("/")[2]
    return re.sub(r"[^a-z0-9]+", "-", last)[:30].strip("-")
