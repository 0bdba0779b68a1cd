"""Queries of jobs' statuses: from running watches, else from lists."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Unreachable
from ...job import State, Status
from ...printable import one_line
from .. import names
from ..client.errors import ApiError, Forbidden
from ..native_id import Native
from . import job_states, pod_states, watch

if TYPE_CHECKING:
    from ..client.api import Api

Object = dict[str, Any]

_BATCH_SIZE = 100  # ids in one selector: it is part of a URL
# Excludes the most frequent warnings of a busy namespace, which the pods' conditions show too.
_EVENT_SELECTOR = ",reason!=FailedScheduling,reason!=BackOff,reason!=Failed,reason!=Unhealthy"
_MAX_SINGLE_READS = 8  # objects whose warnings are queried one by one; for more, the whole namespace is listed

logger = logging.getLogger(__name__)
_cannot_annotate: set[str] = set()  # identities of clients without the permission


def statuses(api: Api, natives: Sequence[Native], *, ttl: bool = False) -> tuple[dict[str, Status], dict[str, str]]:
    """Return the status of each job, and the reason for each job that could not be queried.

    `ttl`: True if the cluster removes jobs by itself. Raises an ApiError when the server refuses the query.
    """
    status_by_id: dict[str, Status] = {}
    unreachable: dict[str, str] = {}
    groups: dict[tuple[str, str], list[Native]] = {}
    watched: dict[str, dict[Native, tuple[Object, list[Object]]]] = {}
    for native in natives:
        snapshot = _cached_snapshot(api, native)
        if snapshot is not None:
            watched.setdefault(native.namespace, {})[native] = snapshot
        else:
            groups.setdefault((native.namespace, native.workload), []).append(native)
    for namespace, snapshots in watched.items():
        try:
            now = api.now()
            base_statuses = {native: job_states.status_of(*objects, now=now) for native, objects in snapshots.items()}
            updated = _with_warnings(api, namespace, snapshots, base_statuses)
            status_by_id |= {str(native): status for native, status in updated.items()}
        except Unreachable as error:
            unreachable |= dict.fromkeys(map(str, snapshots), str(error))
    for (namespace, _), group in groups.items():
        for batch in (group[start : start + _BATCH_SIZE] for start in range(0, len(group), _BATCH_SIZE)):
            try:
                status_by_id |= _list_statuses(api, namespace, batch, ttl=ttl)
            except Unreachable as error:
                unreachable |= dict.fromkeys(map(str, batch), str(error))
    return status_by_id, unreachable


def workload_of(api: Api, native: Native) -> Object | None:
    """Return the job's object as it is now, or None."""
    live = _get_workload(api, native)
    return live if live is not None and native.owns(live) else None


def replaced(api: Api, native: Native) -> bool:
    """Return True if a later object now has the name of the job's object."""
    live = _get_workload(api, native) if native.uid else None
    return live is not None and not native.owns(live)


def _get_workload(api: Api, native: Native) -> Object | None:
    return api.get_or_none(api.path(native.api_version, native.plural, native.name, namespace=native.namespace))


def pod_of(api: Api, native: Native, name: str) -> Object | None:
    """Return the job's pod of that name as it is now, or None."""
    return api.get_or_none(api.path("v1", "pods", name, namespace=native.namespace))


def pods_of(api: Api, native: Native) -> list[Object]:
    """Return the job's pods as they are now."""
    return list(api.items(api.path("v1", "pods", namespace=native.namespace), {"labelSelector": native.selector}))


def _cached_snapshot(api: Api, native: Native) -> tuple[Object, list[Object]] | None:
    """Return the job's object and pods from a watch, or None if they must be queried, as every final status must."""
    watcher = watch.running(api, native)
    snapshot = None if watcher is None else watcher.snapshot()
    if snapshot is None:
        return None
    workload, pods = snapshot
    # One of the two watches, of pods and of objects, may lag behind the other.
    if workload is None or not native.owns(workload):
        return None
    if job_states.status_of(workload, pods, now=api.now()).state.final:
        return None
    return workload, pods


def _list_statuses(api: Api, namespace: str, natives: Sequence[Native], *, ttl: bool) -> dict[str, Status]:
    workloads = _workloads(api, namespace, natives)
    existing = [native for native in natives if native.name in workloads and native.owns(workloads[native.name])]
    pods: dict[str, list[Object]] = {}
    for pod in api.items(api.path("v1", "pods", namespace=namespace), {"labelSelector": _selector(natives)}):
        pods.setdefault(((pod.get("metadata") or {}).get("labels") or {}).get(names.JOB_ID, ""), []).append(pod)
    job_pods = {native: pods.get(names.label_value(native.job_id), []) for native in natives}
    status_by_native = {native: _status(api, native, workloads[native.name], job_pods[native]) for native in existing}
    for native in existing:
        _note_end(api, native, workloads[native.name], status_by_native[native])
    status_by_native |= _with_warnings(
        api, namespace, {native: (workloads[native.name], job_pods[native]) for native in existing}, status_by_native
    )
    for native in natives:
        if native not in status_by_native:
            # If a later object has the name, the pods are that one's.
            orphans = [] if native.name in workloads else job_pods[native]
            status_by_native[native] = job_states.status_when_gone(native.kind, orphans, api.now(), ttl=ttl)
    return {str(native): status_by_native[native] for native in natives}


def _with_warnings(
    api: Api, namespace: str, jobs: Mapping[Native, tuple[Object, list[Object]]], base_statuses: Mapping[Native, Status]
) -> dict[Native, Status]:
    """Return the statuses, those of waiting jobs updated by the cluster's warnings."""
    waiting = [
        native
        for native, (workload, pods) in jobs.items()
        if not base_statuses[native].state.final
        and (
            base_statuses[native].state is State.QUEUED
            or any(map(pod_states.not_ready, pods))
            or job_states.has_missing_pods(workload, pods)
        )
    ]
    events = _warnings(api, namespace, {native: jobs[native][1] for native in waiting})
    now = api.now()
    updated = {native: job_states.status_of(*jobs[native], events.get(native, []), now=now) for native in waiting}
    return {**base_statuses, **updated}


def _status(api: Api, native: Native, workload: Object, pods: list[Object]) -> Status:
    """Return a job's status by its pods; for a failed job also by watched pods that have been deleted."""
    status = job_states.status_of(workload, pods, now=api.now())
    watcher = watch.running(api, native)
    if status.state is not State.FAILED or watcher is None:
        return status
    present_nodes = {names.node_of(pod) for pod in pods}
    last = {names.node_of(pod): pod for pod in watcher.deleted_pods()}
    deleted = [pod for node, pod in last.items() if node not in present_nodes]
    full_status = job_states.status_of(workload, [*pods, *deleted], now=api.now())
    return full_status if full_status.state.final else status


def _note_end(api: Api, native: Native, workload: Object, status: Status) -> None:
    """Record on the job's object a failure that only its pods show, before they are gone. Errors are only logged."""
    if status.state is not State.FAILED or api.identity in _cannot_annotate:
        return
    if job_states.status_of(workload, now=api.now()) == status:
        return
    note = json.dumps(status.to_json(), separators=(",", ":"))
    body = {"metadata": {"uid": workload["metadata"].get("uid"), "annotations": {names.END: note}}}
    path = api.path(native.api_version, native.plural, native.name, namespace=native.namespace)
    try:
        api.call("PATCH", path, body=body, content_type="application/merge-patch+json")
    except (ApiError, Unreachable) as error:
        logger.debug("the end of job %s is not noted: %s", native.job_id, error)
        _cannot_annotate.add(api.identity)


def _workloads(api: Api, namespace: str, natives: Sequence[Native]) -> dict[str, Object]:
    """Return the objects of jobs of one kind, by name."""
    if len(natives) == 1:
        single = _get_workload(api, natives[0])
        return {} if single is None else {natives[0].name: single}
    path = api.path(natives[0].api_version, natives[0].plural, namespace=namespace)
    query = {"labelSelector": _selector(natives)}
    workloads = {str(workload["metadata"]["name"]): workload for workload in api.items(path, query)}
    # An object without the label still exists: query by name what the list lacks.
    for native in natives:
        if native.name not in workloads and (live := _get_workload(api, native)) is not None:
            workloads[native.name] = live
    return workloads


def _warnings(api: Api, namespace: str, jobs: dict[Native, list[Object]]) -> dict[Native, list[Object]]:
    """Return the cluster's warnings about these jobs; none without permission to read events."""
    names_by_job = {native: watch.workload_and_pods(native, pods) for native, pods in jobs.items()}
    involved_names = {name for entry in names_by_job.values() for name in entry}
    if not involved_names:
        return {}
    path = api.path("v1", "events", namespace=namespace)
    filter_names = sorted(involved_names) if len(involved_names) <= _MAX_SINGLE_READS else [None]
    events: dict[str, list[Object]] = {}
    try:
        for name in filter_names:
            query = {"fieldSelector": watch.WARNINGS + (f",involvedObject.name={name}" if name else _EVENT_SELECTOR)}
            for entry in api.items(path, query):
                events.setdefault(str((entry.get("involvedObject") or {}).get("name")), []).append(entry)
    except Forbidden as error:
        logger.warning("%s; why a job waits or stands still may be left out", one_line(str(error)))
    return {
        native: [event for name in job_names for event in events.get(name, [])]
        for native, job_names in names_by_job.items()
    }


def _selector(natives: Iterable[Native]) -> str:
    return names.selector_of(names.label_value(native.job_id) for native in natives)
