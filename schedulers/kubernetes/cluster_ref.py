"""The cluster that a job was sent to and the digest of its code, stored with its record.

A change of the current context does not affect the job. An interrupted submit resumes with the same code.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..convert import convert
from ..errors import StoreError
from ..store import atomic_files
from .options import KubernetesOptions

if TYPE_CHECKING:
    from .client.api import Api
    from .client.kubeconfig import Access

_FILE = "kubernetes/placed.json"


@dataclass(frozen=True, kw_only=True)
class ClusterRef:
    """The cluster and the code of a submitted job.

    kubeconfig, context: None in a pod of the cluster.
    snapshot: the digest of the packed code directory; None if the code is in the image.
    """

    namespace: str
    kubeconfig: str | None = None
    context: str | None = None
    snapshot: str | None = None

    @classmethod
    def of(cls, access: Access, snapshot: str | None) -> ClusterRef:
        return cls(namespace=access.namespace, kubeconfig=access.files, context=access.context, snapshot=snapshot)

    def options(self, options: KubernetesOptions) -> KubernetesOptions:
        """Return the target's options for that cluster."""
        return replace(options, kubeconfig=self.kubeconfig, context=self.context, namespace=self.namespace)


def read(jobs: Path, job_id: str) -> ClusterRef | None:
    """Return a job's cluster, or None if it was not sent or another machine submitted it. Raises StoreError."""
    path = str(jobs / job_id / _FILE)
    document = atomic_files.read_document(path)
    if document is None:
        return None
    try:
        return convert({"namespace": "default", **document}, ClusterRef)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None


def identity(api: Api, namespace: str) -> str:
    """Return this cluster's identity (`target.Identifies`). Raises Unreachable, ApiError."""
    from .client.errors import Forbidden, NotFound

    digest = hashlib.sha256(api.server.encode())
    digest.update(str(api.access.cluster.get("certificate-authority-data") or "").encode())
    with contextlib.suppress(OSError, KeyError):
        digest.update(Path(api.access.cluster["certificate-authority"]).read_bytes())
    server = f"server={digest.hexdigest()[:16]}"
    try:
        uid = api.call("GET", api.path("v1", "namespaces", namespace, namespace=""))["metadata"]["uid"]
    except NotFound:
        uid = "none"
    except Forbidden:
        return server
    return f"namespace={uid} {server}"


def write(jobs: Path, job_id: str, ref: ClusterRef) -> None:
    """Store the job's cluster. Raises StoreError."""
    path = str(jobs / job_id / _FILE)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    except OSError as error:
        raise atomic_files.store_error(error, path, "write") from error
    atomic_files.write_document(path, ref.__dict__)
