"""Dry run of a job's objects on an API server (`accel submit --dry-run=server`).

Servers since 1.25 refuse unknown fields; older ones drop them, which their response shows.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecError, SubmitError
from ..job import JobSpec
from . import code_upload, submit
from .client.api import Api
from .client.errors import ApiError, Forbidden
from .manifests import build
from .manifests import code_delivery as delivery
from .options import KubernetesOptions

# A namespace that enforces its standard accepts the Job with this warning, and refuses its pods.
_NO_PODS = "would violate PodSecurity"
_QUERY = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "accel"}


def review(api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str) -> list[str]:
    """Return a line for each object or field that the cluster would refuse or drop. Nothing is created there.

    Other warnings of the API server are logged. Trainer's webhook stops at a TrainJob's missing runtime, and reports
    nothing else.

    Raises Unreachable, ConfigError, SnapshotError.
    """
    try:
        with contextlib.suppress(Forbidden):  # the reply to each object reports it
            build.check_kind(options, api.versions(), api.target)
            build.check_restarts(spec, options, api.version, api.target)
        manifests = _built(api, spec, options, job_id)
    except SpecError as error:
        return [str(error)]
    lines: list[str] = []
    for manifest in manifests:
        lines += _lines(api, manifest)
    return list(dict.fromkeys(lines))


def _built(api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str) -> list[delivery.Object]:
    """Return the objects as `submit` creates them, without their owner. Raises SpecError."""
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        _, data = code_upload.pack(spec, options, Path(scratch), None)
    code = delivery.Code(kind="image")
    if data is not None:
        code = delivery.choose_delivery(options, len(data), delivery.digest_of(data), api.target)
    manifests = build.build(spec, options, job_id, code, target=api.target, data=data)
    loaders = [build.loader_pod(spec, options, job_id, api.target)] if code.kind == "pvc" else []
    return [
        build.with_digest(manifest, spec if manifest is manifests.workload else None)
        for manifest in (*loaders, *manifests)
    ]


def _lines(api: Api, manifest: delivery.Object) -> Iterator[str]:
    if manifest["kind"] == "Pod":  # which uploads the code to a claim
        try:
            code_upload.check_claim(api, manifest)
        except SubmitError as error:
            yield str(error)
    warnings: list[str] = []
    try:
        reply = api.call("POST", submit.list_of(api, manifest), body=manifest, query=_QUERY, on_warning=warnings.append)
    except ApiError as error:
        if not submit.lacks_runtime(error):  # a submit creates it first, a dry run never
            yield str(error)
    else:
        for text in warnings:
            line = submit.warning(api, manifest, text)
            if _NO_PODS in text:
                yield line
            else:
                submit.progress.warning("%s", line)
        label = submit.object_label(manifest)
        for field_path in dropped_fields(manifest, reply):
            yield f"{api.label}: {label}: {field_path}: unknown to the cluster, which would drop it"


def dropped_fields(requested: object, returned: object, field_path: str = "") -> Iterator[str]:
    """Yield the paths that are in `requested` and not in `returned`. Empty values do not count: servers omit them."""
    if isinstance(requested, Mapping) and isinstance(returned, Mapping):
        for key, value in requested.items():
            child_path = f"{field_path}.{key}" if field_path else str(key)
            if key in returned:
                yield from dropped_fields(value, returned[key], child_path)
            elif not _is_empty(value):
                yield child_path
    elif isinstance(requested, list) and isinstance(returned, list):
        for index, value in enumerate(requested):
            counterpart = _matching_item(value, index, returned)
            if counterpart is not None:
                yield from dropped_fields(value, counterpart, f"{field_path}[{index}]")
            elif not _is_empty(value):
                yield f"{field_path}[{index}]"


def _matching_item(value: object, index: int, returned: Sequence[Any]) -> object:
    """Return the item that corresponds to `value`: by name, since others may be inserted, else by index."""
    if isinstance(value, Mapping) and "name" in value:
        return next(
            (element for element in returned if isinstance(element, Mapping) and element.get("name") == value["name"]),
            None,
        )
    return returned[index] if index < len(returned) else None


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", 0, {}, [])
