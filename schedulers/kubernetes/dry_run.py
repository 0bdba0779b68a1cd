"""Dry run of a job's objects on an API server (`accel submit --dry-run=server`).

Servers since 1.25 refuse unknown fields; older ones drop them, which their response shows.
"""

from __future__ import annotations

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

# Pods of a Job that is accepted are refused where the namespace enforces its standard.
_NO_PODS = "would violate PodSecurity"
_QUERY = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": "accel"}


def review(api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str) -> list[str]:
    """Return a line for each object or field that the cluster would refuse or drop. Nothing is created there.

    Other warnings of the API server are logged. Trainer's webhook checks the runtime of a TrainJob first, and so
    reports nothing else.

    Raises Unreachable, ConfigError, SnapshotError.
    """
    try:
        build.check_kind(options, api.versions(), api.target)
        build.check_restarts(spec, options, api.version, api.target)
        made = _built(api, spec, options, job_id)
    except Forbidden:
        made = _built(api, spec, options, job_id)  # the answer to each object will say it
    except SpecError as error:
        return [str(error)]
    lines: list[str] = []
    for each in made:
        lines += _lines(api, each)
    return list(dict.fromkeys(lines))


def _built(api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str) -> list[delivery.Object]:
    """Return the objects as `submit` creates them, without their owner. Raises SpecError."""
    with tempfile.TemporaryDirectory(prefix="accel-") as scratch:
        _, data = code_upload.pack(spec, options, Path(scratch), None)
    code = delivery.Code(kind="image")
    if data is not None:
        code = delivery.chosen(options, len(data), delivery.digest_of(data), api.target)
    carried = data if code.kind == "configmap" else None
    made = build.build(spec, options, job_id, code, target=api.target, data=carried)
    loaders = [build.loader_pod(spec, options, job_id, api.target)] if code.kind == "pvc" else []
    return [build.stamped(each, spec if each is made.workload else None) for each in (*loaders, *made)]


def _lines(api: Api, made: delivery.Object) -> Iterator[str]:
    yield from _claim_lines(api, made)
    warnings: list[str] = []
    try:
        answer = api.call("POST", submit.list_of(api, made), body=made, query=_QUERY, warned=warnings.append)
    except ApiError as error:
        if not submit.lacks_runtime(error):  # which is made first, and by a dry run not at all
            yield str(error)
    else:
        for text in warnings:
            line = submit.warning(api, made, text)
            if _NO_PODS in text:
                yield line
            else:
                submit.progress.warning("%s", line)
        called = submit.called(made)
        for place in dropped(made, answer):
            yield f"{api.where}: {called}: {place}: the cluster does not know it, and would leave it out"


def _claim_lines(api: Api, made: delivery.Object) -> Iterator[str]:
    """Check the pod that uploads the code to a claim."""
    if made["kind"] == "Pod":
        try:
            code_upload.check_claim(api, made)
        except SubmitError as error:
            yield str(error)


def dropped(sent: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Return the paths that are in `sent` and not in `there`. Empty values do not count: servers omit them."""
    return list(_dropped(sent, there, ""))


def _dropped(sent: object, there: object, place: str) -> Iterator[str]:
    if isinstance(sent, Mapping) and isinstance(there, Mapping):
        for key, value in sent.items():
            inner = f"{place}.{key}" if place else str(key)
            if key in there:
                yield from _dropped(value, there[key], inner)
            elif not _is_empty(value):
                yield inner
    elif isinstance(sent, list) and isinstance(there, list):
        for index, value in enumerate(sent):
            found = _same(value, index, there)
            if found is not None:
                yield from _dropped(value, found, f"{place}[{index}]")
            elif not _is_empty(value):
                yield f"{place}[{index}]"


def _same(value: object, index: int, there: Sequence[Any]) -> object:
    """Return the item that corresponds to `value`: by name, since others may be inserted, else by index."""
    if isinstance(value, Mapping) and "name" in value:
        return next((each for each in there if isinstance(each, Mapping) and each.get("name") == value["name"]), None)
    return there[index] if index < len(there) else None


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", 0, {}, [])
