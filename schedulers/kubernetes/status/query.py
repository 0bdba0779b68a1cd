"""Queries of jobs' statuses: from running watches, else from lists."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import Unreachable
from ...job import State, Status
from ...printable import one_line
from .. import names
from ..client.errors import ApiError, Forbidden, NotFound
from ..native_id import Native
from . import job_states, pod_states, watch

if TYPE_CHECKING:
    from ..client.api import Api

Object = dict[str, Any]

_AT_ONCE = 100  # ids in one selector: it is part of a URL
# What pods' own conditions say too, and what is most of a busy namespace's warnings.
_NOT_OF_USE = ",reason!=FailedScheduling,reason!=BackOff,reason!=Failed,reason!=Unhealthy"
_FEW = 8  # objects whose warnings are asked for one by one; of more, those of the whole namespace are

logger = logging.getLogger(__name__)
_may_not_note: set[str] = set()  # identities of connections


def statuses(api: Api, natives: Sequence[Native], *, ttl: bool = False) -> tuple[dict[str, Status], dict[str, str]]:
    """Return the status of each job, and the reason for each job that could not be queried.

    `ttl`: the cluster removes jobs by itself. Raises an ApiError when the server refuses the query.
    """
    found: dict[str, Status] = {}
    silent: dict[str, str] = {}
    groups: dict[tuple[str, str], list[Native]] = {}
    watched: dict[str, dict[Native, tuple[Object, list[Object]]]] = {}
    for native in natives:
        seen = _watched(api, native)
        if seen is not None:
            watched.setdefault(native.namespace, {})[native] = seen
        else:
            groups.setdefault((native.namespace, native.workload), []).append(native)
    for namespace, known in watched.items():
        try:
            now = api.now()
            plain = {native: job_states.status_of(*there, now=now) for native, there in known.items()}
            warned = _with_warnings(api, namespace, known, plain)
            found |= {str(native): status for native, status in warned.items()}
        except Unreachable as error:
            silent |= dict.fromkeys(map(str, known), str(error))
    for (namespace, _), group in groups.items():
        for part in (group[at : at + _AT_ONCE] for at in range(0, len(group), _AT_ONCE)):
            try:
                found |= _listed(api, namespace, part, ttl=ttl)
            except Unreachable as error:
                silent |= dict.fromkeys(map(str, part), str(error))
    return found, silent


def workload_of(api: Api, native: Native) -> Object | None:
    """Return the job's object as it is now, or None."""
    there = _of_its_name(api, native)
    return there if there is not None and native.owns(there) else None


def replaced(api: Api, native: Native) -> bool:
    """Return True if a later object now has the name of the job's object."""
    there = _of_its_name(api, native) if native.uid else None
    return there is not None and not native.owns(there)


def _of_its_name(api: Api, native: Native) -> Object | None:
    return _got(api, api.path(native.api_version, native.plural, native.name, namespace=native.namespace))


def pod_of(api: Api, native: Native, name: str) -> Object | None:
    """Return the job's pod of that name as it is now, or None."""
    return _got(api, api.path("v1", "pods", name, namespace=native.namespace))


def _got(api: Api, path: str) -> Object | None:
    try:
        return api.call("GET", path)
    except NotFound:
        return None


def pods_of(api: Api, native: Native) -> list[Object]:
    """Return the job's pods as they are now."""
    return list(listed(api, api.path("v1", "pods", namespace=native.namespace), {"labelSelector": native.selector}))


def listed(api: Api, path: str, query: dict[str, str]) -> Iterator[Object]:
    """Yield the selected objects of a collection, page by page."""
    for answer in api.pages(path, query):
        yield from answer.get("items") or []


def _watched(api: Api, native: Native) -> tuple[Object, list[Object]] | None:
    """Return the job's object and pods from a watch, or None if they must be queried, as every final status must."""
    watcher = watch.running(api, native)
    seen = None if watcher is None else watcher.snapshot()
    if seen is None:
        return None
    workload, pods = seen
    # The watches of pods and of objects are two, and the one may be behind the other.
    if workload is None or not native.owns(workload):
        return None
    if job_states.status_of(workload, pods, now=api.now()).state.final:
        return None
    return workload, pods


def _listed(api: Api, namespace: str, natives: Sequence[Native], *, ttl: bool) -> dict[str, Status]:
    workloads = _workloads(api, namespace, natives)
    there = [native for native in natives if native.name in workloads and native.owns(workloads[native.name])]
    pods: dict[str, list[Object]] = {}
    for pod in listed(api, api.path("v1", "pods", namespace=namespace), {"labelSelector": _selector(natives)}):
        pods.setdefault(((pod.get("metadata") or {}).get("labels") or {}).get(names.JOB_ID, ""), []).append(pod)
    mine = {native: pods.get(names.label_value(native.job_id), []) for native in natives}
    found = {native: _status(api, native, workloads[native.name], mine[native]) for native in there}
    for native in there:
        _note_end(api, native, workloads[native.name], found[native])
    found |= _with_warnings(api, namespace, {native: (workloads[native.name], mine[native]) for native in there}, found)
    for native in natives:
        if native not in found:
            left = [] if native.name in workloads else mine[native]  # else they are of a later object of its name
            found[native] = job_states.status_when_gone(native.kind, left, api.now(), ttl=ttl)
    return {str(native): found[native] for native in natives}


def _with_warnings(
    api: Api, namespace: str, jobs: Mapping[Native, tuple[Object, list[Object]]], known: Mapping[Native, Status]
) -> dict[Native, Status]:
    """Return the statuses. Those of waiting jobs also consider the cluster's warnings."""
    waiting = [
        native
        for native, (workload, pods) in jobs.items()
        if not known[native].state.final
        and (
            known[native].state is State.QUEUED
            or any(map(pod_states.not_ready, pods))
            or job_states.lacks_pods(workload, pods)
        )
    ]
    events = _warnings(api, namespace, {native: jobs[native][1] for native in waiting})
    now = api.now()
    warned = {native: job_states.status_of(*jobs[native], events.get(native, []), now=now) for native in waiting}
    return {**known, **warned}


def _status(api: Api, native: Native, workload: Object, pods: list[Object]) -> Status:
    """Return a job's status by its pods; if it failed, also by gone ones, which operators delete at once."""
    status = job_states.status_of(workload, pods, now=api.now())
    watcher = watch.running(api, native)
    if status.state is not State.FAILED or watcher is None:
        return status
    there = {names.node_of(pod) for pod in pods}
    last = {names.node_of(pod): pod for pod in watcher.deleted_pods()}
    deleted = [pod for node, pod in last.items() if node not in there]
    known = job_states.status_of(workload, [*pods, *deleted], now=api.now())
    return known if known.state is State.FAILED else status


def _note_end(api: Api, native: Native, workload: Object, status: Status) -> None:
    """Record a failure that only pods show on the job's object: they may be gone first. Errors are only logged."""
    if status.state is not State.FAILED or api.identity in _may_not_note:
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
        _may_not_note.add(api.identity)


def _workloads(api: Api, namespace: str, natives: Sequence[Native]) -> dict[str, Object]:
    """Return the objects of jobs of one kind, by name."""
    if len(natives) == 1:
        only = _of_its_name(api, natives[0])
        return {} if only is None else {natives[0].name: only}
    path = api.path(natives[0].api_version, natives[0].plural, namespace=namespace)
    query = {"labelSelector": _selector(natives)}
    found = {str(each["metadata"]["name"]): each for each in listed(api, path, query)}
    # Somebody may have taken the label away: what is not in the list is asked for by its name before it is gone.
    for native in natives:
        if native.name not in found and (there := _of_its_name(api, native)) is not None:
            found[native.name] = there
    return found


def _warnings(api: Api, namespace: str, jobs: dict[Native, list[Object]]) -> dict[Native, list[Object]]:
    """Return the cluster's warnings about these jobs; none without permission to read events."""
    about = {native: watch.concerned(native, pods) for native, pods in jobs.items()}
    wanted = {name for each in about.values() for name in each}
    if not wanted:
        return {}
    path = api.path("v1", "events", namespace=namespace)
    few = sorted(wanted) if len(wanted) <= _FEW else [None]
    events: dict[str, list[Object]] = {}
    try:
        for name in few:
            query = {"fieldSelector": watch.WARNINGS + (f",involvedObject.name={name}" if name else _NOT_OF_USE)}
            for each in listed(api, path, query):
                events.setdefault(str((each.get("involvedObject") or {}).get("name")), []).append(each)
    except Forbidden as error:
        logger.warning("%s; why a job waits or stands still may be left out", one_line(str(error)))
    return {native: [event for name in mine for event in events.get(name, [])] for native, mine in about.items()}


def _selector(natives: Iterable[Native]) -> str:
    return names.selector_of(names.label_value(native.job_id) for native in natives)


__all__ = ["listed", "pod_of", "pods_of", "replaced", "statuses", "workload_of"]
