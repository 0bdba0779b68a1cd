"""Removal of finished jobs' objects, and of everything that an interrupted submit left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import SchedulerError
from . import names
from .client.api import Api
from .client.errors import ApiError, Forbidden, NotFound
from .manifests.build import POD_GROUP
from .manifests.trainjob import API_VERSION, RUNTIME_PLURAL
from .native_id import Native
from .options import KubernetesOptions
from .status import job_states

# A selector is a part of a URL.
_AT_ONCE = 50


def clear(api: Api, options: KubernetesOptions, jobs: Sequence[Native]) -> list[str]:
    """Delete the jobs' objects. Return a line for each job that could not be cleared."""
    groups: dict[tuple[str, str], list[Native]] = {}
    for native in jobs:
        groups.setdefault((native.workload, native.namespace), []).append(native)
    kept: dict[str, str] = {}
    for group in groups.values():
        for start in range(0, len(group), _AT_ONCE):
            some = group[start : start + _AT_ONCE]
            try:
                _clear(api, options, some, kept)
            except SchedulerError as error:
                kept |= {native.job_id: str(error) for native in some if native.job_id not in kept}
    return [f"{api.where} keeps job {job}: {why.removeprefix(f'{api.where}: ')}" for job, why in kept.items()]


def _clear(api: Api, options: KubernetesOptions, jobs: Sequence[Native], kept: dict[str, str]) -> None:
    """Clear jobs of one kind and one namespace. `kept`: job id -> why it stays."""
    first = jobs[0]
    mine = {names.label_value(native.job_id): native for native in jobs}
    listed: list[dict[str, Any]] = []
    with contextlib.suppress(NotFound):  # the kind is not there any more
        at = api.path(first.api_version, first.plural, namespace=first.namespace)
        listed = api.call("GET", at, query={"labelSelector": names.selector_of(mine)}).get("items") or []
    for each in listed:
        metadata = each["metadata"]
        label = metadata["labels"][names.JOB_ID]
        if not mine[label].owns(each):
            del mine[label]  # a later object of the name is another job's, and so is all that has the label
            continue
        status = job_states.status_of({**each, "kind": first.kind})
        job = mine[label].job_id
        if status.state.final:
            path = api.path(first.api_version, first.plural, metadata["name"], namespace=first.namespace)
            _delete(api, path, job, kept)
        else:
            kept[job] = f"it is not over there: {status.state.value}{f' ({status.message})' if status.message else ''}"
    gone = [native for native in mine.values() if native.job_id not in kept]
    for path, job in (*_named(api, options, gone), *_labelled(api, options, first, mine)):
        if job not in kept:
            _delete(api, path, job, kept)


def _delete(api: Api, path: str, job: str, kept: dict[str, str]) -> None:
    try:
        api.call("DELETE", path, query={"propagationPolicy": "Background"})
    except NotFound:
        return
    except ApiError as error:
        kept[job] = str(error)


def _named(api: Api, options: KubernetesOptions, jobs: Sequence[Native]) -> Iterator[tuple[str, str]]:
    """Yield (path, job id) of objects created before the job's object and under its name."""
    for native in jobs:
        if native.workload == "trainjob":
            yield api.path(API_VERSION, RUNTIME_PLURAL, native.name, namespace=native.namespace), native.job_id
        if options.volcano_queue is not None and native.workload in ("job", "jobset"):
            yield api.path(POD_GROUP, "podgroups", native.name, namespace=native.namespace), native.job_id


def _labelled(
    api: Api, options: KubernetesOptions, of: Native, jobs: Mapping[str, Native]
) -> Iterator[tuple[str, str]]:
    """Yield (path, job id) of objects without an owner to be deleted with. `jobs`: by their label."""
    if not jobs:
        return
    query = {"labelSelector": names.selector_of(jobs)}
    plurals = ["services"]
    plurals += ["configmaps"] if options.code in ("auto", "configmap") else []
    plurals += ["pods"] if options.code_claim is not None else []
    for plural in plurals:
        try:
            found = api.call("GET", api.path("v1", plural, namespace=of.namespace), query=query).get("items") or []
        except Forbidden:
            continue  # whoever may not see them has made none
        for each in found:
            metadata = each["metadata"]
            if not metadata.get("ownerReferences"):
                path = api.path("v1", plural, metadata["name"], namespace=of.namespace)
                yield path, jobs[metadata["labels"][names.JOB_ID]].job_id
