"""Delivery of code to the pods: volumes and init containers of the pod template, and ConfigMaps."""

from __future__ import annotations

import base64
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...errors import SpecError
from ...node import archive
from ..options import KubernetesOptions

Object = dict[str, Any]

DIRECTORY = "/accel/code"
# The volume with the packed code, and the container that unpacks it; the container that fetches it from a store.
CODE_VOLUME, FETCH = "accel-code", "accel-fetch"
_HOME, PACKED = "/accel", "/accel-code"
_FETCHED = f"{_HOME}/packed"
# Limits of one ConfigMap: https://kubernetes.io/docs/concepts/configuration/configmap/
MAX_CONFIGMAP_BYTES = 1 << 20
_PART = 768 << 10
# The last lines of these containers become their termination message.
_POLICY = "FallbackToLogsOnError"
_UNKNOWN = "{sha256 of the packed code}"

# Runs in the job's image with any Python from 3.8 on, and does not use accel, which the image may lack. A pod whose
# sandbox is recreated runs it again and finds the code in place.
_UNPACK = """

import hashlib, shutil, sys
digest, target, *parts = sys.argv[1:]
if os.path.isdir(target):
    sys.exit(0)
whole, making = hashlib.sha256(), target + ".tmp"
shutil.rmtree(making, ignore_errors=True)
os.makedirs(making)
packed = making + ".tar.gz"
with open(packed, "wb") as out:
    for part in parts:
        with open(part, "rb") as file:
            for data in iter(lambda: file.read(1 << 20), b""):
                whole.update(data)
                out.write(data)
if whole.hexdigest() != digest:
    sys.exit("accel: the code is not what was submitted: its sha256 is %s, not %s" % (whole.hexdigest(), digest))
with tarfile.open(packed, "r:gz", encoding="utf-8", errors="surrogateescape") as tar:
    extract(tar, making)
os.unlink(packed)
os.rename(making, target)
"""
UNPACK = inspect.getsource(archive) + _UNPACK


@dataclass(frozen=True, kw_only=True)
class Code:
    """The location of a job's code.

    kind:   configmap (in `parts` of them), pvc, store, or image: nothing needs to be delivered.
    digest: sha256 of the packed code, in hexadecimal, or a placeholder before packing.
    """

    kind: Literal["configmap", "pvc", "store", "image"]
    digest: str = _UNKNOWN
    parts: int = 1

    @property
    def file(self) -> str:
        """The file's name in a claim or an object store; equal for equal content."""
        return f"{self.digest}.tar.gz"


def plan_delivery(options: KubernetesOptions) -> Code:
    """Return the location before packing. `auto` assumes small code."""
    return Code(kind="configmap" if options.code == "auto" else options.code)


def choose_delivery(options: KubernetesOptions, size: int, digest: str, name: str) -> Code:
    """Return the location for packed code of this size and digest. Raises SpecError if there is none."""
    kind = options.code
    if kind == "auto":
        fallback: Literal["pvc", "store", "configmap"]
        fallback = "pvc" if options.code_claim else "store" if options.code_store else "configmap"
        kind = "configmap" if size <= MAX_CONFIGMAP_BYTES else fallback
    if kind == "configmap" and size > MAX_CONFIGMAP_BYTES:
        raise SpecError(
            f"target {name}: the code is {size / MAX_CONFIGMAP_BYTES:.1f} MiB, packed, and ConfigMaps hold 1 MiB: "
            "exclude files that the job does not need (.accelignore), set code_claim: or code_store:, "
            "or put it into the image (code: image)"
        )
    return Code(kind=kind, digest=digest, parts=max(1, -(-size // _PART)) if kind == "configmap" else 1)


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config_maps(name: str, labels: Mapping[str, str], namespace: str | None, data: bytes) -> list[Object]:
    """Return the immutable ConfigMaps of the packed code, `Code.parts` of them."""
    parts = [data[offset : offset + _PART] for offset in range(0, len(data), _PART)] or [b""]
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": _config_map(name, index),
                **({"namespace": namespace} if namespace else {}),
                "labels": dict(labels),
            },
            "immutable": True,
            "binaryData": {_part(index): base64.b64encode(part).decode()},
        }
        for index, part in enumerate(parts)
    ]


def workdir(code: Code, options: KubernetesOptions, subdirectory: str) -> str | None:
    """Return the program's working directory; None for the image's own."""
    top = options.code_dir if code.kind == "image" else DIRECTORY
    if top is None:
        if subdirectory != ".":
            raise SpecError(
                f"the job runs in {subdirectory!r} of its code: set code_dir to the code's directory in the image"
            )
        return None
    return top if subdirectory == "." else f"{top.rstrip('/')}/{subdirectory}"


def volumes(code: Code, options: KubernetesOptions, name: str) -> list[Object]:
    """Return the volumes with the packed code."""
    if code.kind == "configmap":
        sources = [{"configMap": {"name": _config_map(name, index)}} for index in range(code.parts)]
        return [{"name": CODE_VOLUME, "projected": {"sources": sources}}]
    if code.kind == "pvc":
        claim = {"claimName": options.code_claim, "readOnly": True}
        return [{"name": CODE_VOLUME, "persistentVolumeClaim": claim}]
    return []


def init_containers(
    code: Code, options: KubernetesOptions, base: Object, python: str, mounted: Sequence[Object] = ()
) -> list[Object]:
    """Return the containers that deliver the code. `base`, `mounted`: the settings and mounts of all containers."""
    if code.kind == "image":
        return []
    home: Object = {"name": "accel", "mountPath": _HOME}
    mounts = [home]
    if code.kind == "store":
        parts = [f"{_FETCHED}/{code.file}"]
    else:
        names = [_part(index) for index in range(code.parts)] if code.kind == "configmap" else [code.file]
        parts = [f"{PACKED}/{name}" for name in names]
        mounts.append({"name": CODE_VOLUME, "mountPath": PACKED, "readOnly": True})
    unpack = {
        "name": CODE_VOLUME,
        **base,
        "command": [python, "-c", UNPACK, code.digest, DIRECTORY, *parts],
        "terminationMessagePolicy": _POLICY,
        "volumeMounts": [*mounts, *mounted],
    }
    return [*_fetching(code, options, base, mounted), unpack]


def _fetching(code: Code, options: KubernetesOptions, base: Object, mounted: Sequence[Object]) -> Sequence[Object]:
    store = options.code_store
    if code.kind != "store" or store is None:
        return []
    source = f"{store.url.rstrip('/')}/{code.file}"
    command = ["aws", "s3", "cp", "--only-show-errors", source, f"{_FETCHED}/{code.file}"]
    if store.endpoint is not None:
        command += ["--endpoint-url", store.endpoint]
    env = [{"name": "HOME", "value": _HOME}]
    if store.region is not None:
        env.append({"name": "AWS_REGION", "value": store.region})
    fetch: Object = {**base, "name": FETCH, "image": store.image, "command": command, "env": env}
    fetch["terminationMessagePolicy"] = _POLICY
    if store.secret is not None:
        fetch["envFrom"] = [{"secretRef": {"name": store.secret}}]
    fetch["volumeMounts"] = [{"name": "accel", "mountPath": _HOME}, *mounted]
    return [fetch]


def _config_map(name: str, index: int) -> str:
    return f"{name}-code-{index}"


def _part(index: int) -> str:
    return f"code-{index}"
