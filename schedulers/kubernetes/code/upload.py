"""Upload of a job's code: packed, and sent to the place from which the pods load it."""

from __future__ import annotations

from pathlib import Path

from ...errors import SubmitError
from ...job import JobSpec
from ...store import snapshot
from ..client.api import Api
from ..manifests import code_delivery as delivery
from ..options import KubernetesOptions


def pack(spec: JobSpec, options: KubernetesOptions, home: Path, earlier: str | None) -> tuple[str | None, bytes | None]:
    """Return the digest of the code directory and the packed code; (None, None) if the image has the code.

    `earlier`: the digest of an earlier submit, used again while its snapshot exists. Raises SnapshotError.
    """
    if options.code == "image":
        return None, None
    kept = None if earlier is None else home / "snapshots" / f"{earlier}.tar"
    if kept is not None and kept.exists():
        return earlier, _read(kept)
    packed = snapshot.pack(Path(spec.code), home)
    return packed.digest, _read(packed.path)


def _read(path: Path) -> bytes:
    try:
        return delivery.packed(path.read_bytes())
    except OSError as error:
        raise SubmitError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def bring(
    api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str, data: bytes | None
) -> tuple[delivery.Code, bytes | None]:
    """Upload the code. Return its location, and the data that the job's own objects must carry or None.

    Raises SpecError, SubmitError, Unreachable.
    """
    if data is None:
        return delivery.Code(kind="image"), None
    code = delivery.chosen(options, len(data), delivery.digest_of(data), api.target)
    if code.kind == "pvc":
        from ..manifests import loader_pod
        from . import pvc

        pvc.put(api, loader_pod.loader(spec, options, job_id, api.target), code, data)
        return code, None
    if code.kind == "store" and options.code_store is not None:
        from . import object_store

        object_store.put(options.code_store, code, data, api.target)
        return code, None
    return code, data if code.kind == "configmap" else None
