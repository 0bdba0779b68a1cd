"""Which cluster a job was sent to, and what of its code: kept with its record, so that it stays with that cluster
whatever becomes the current context, and so that a submit that was cut off is carried out with the same code."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..convert import convert
from ..errors import StoreError
from ..store import atomic_files
from .options import KubernetesOptions

if TYPE_CHECKING:
    from .client.kubeconfig import Access

_FILE = "kubernetes/placed.json"


@dataclass(frozen=True, kw_only=True)
class Placed:
    """kubeconfig, context: None in a pod of the cluster.
    snapshot: the digest of the code directory, packed; None where the code is in the image.
    """

    namespace: str
    kubeconfig: str | None = None
    context: str | None = None
    snapshot: str | None = None

    def options(self, options: KubernetesOptions) -> KubernetesOptions:
        """The target's options, of that cluster."""
        return replace(options, kubeconfig=self.kubeconfig, context=self.context, namespace=self.namespace)


def placed(access: Access, snapshot: str | None) -> Placed:
    return Placed(namespace=access.namespace, kubeconfig=access.files, context=access.context, snapshot=snapshot)


def read(jobs: Path, job_id: str) -> Placed | None:
    """None of a job that was not sent anywhere yet, or that another machine submitted. Raises StoreError."""
    path = str(jobs / job_id / _FILE)
    document = atomic_files.read_document(path)
    if document is None:
        return None
    try:
        return convert({"namespace": "default", **document}, Placed)
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None


def write(jobs: Path, job_id: str, placed: Placed) -> None:
    """Raises StoreError when it is not on the disk."""
    path = str(jobs / job_id / _FILE)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    except OSError as error:
        raise atomic_files.refusal(error, path, "write") from error
    atomic_files.write_document(path, placed.__dict__)
