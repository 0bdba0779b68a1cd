"""What the cluster says of jobs: from what is watched anyway, and from lists where nothing is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Unreachable
from ..job import Reason, State, Status
from ..printable import one_line
from . import names, states, watching
from .errors import Forbidden, NotFound
from .native import Native

if TYPE_CHECKING:
    from .api import Api

Object = dict[str, Any]

_AT_ONCE = 100  # ids in one selector: it is part of a URL
# What pods' own conditions say too, and what is most of a busy namespace's warnings.
_NOT_OF_USE = ",reason!=FailedScheduling,reason!=BackOff,reason!=Failed,reason!=Unhealthy"
_FEW = 8  # objects whose warnings are asked for one by one; of more, those of the whole namespace are

logger = logging.getLogger(__name__)


def statuses(api: Api, natives: Sequence[Native], *, ttl: bool = False) -> tuple[dict[str, Status], dict[str, str]]:
    """The status of each job; and why, of those that could not be asked about. `ttl`: the cluster removes jobs itself.

    Raises an ApiError when the server refuses the question.
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
            found |= {str(native): status for native, status in _with_warnings(api, namespace, known).items()}
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
    """The job's object now; None when there is none."""
    return _got(api, api.path(native.api_version, native.plural, native.name, namespace=native.namespace))


def pod_of(api: Api, native: Native, name: str) -> Object | None:
    """One of the job's pods now; None when there is none of that name."""
    return _got(api, api.path("v1", "pods", name, namespace=native.namespace))


def _got(api: Api, path: str) -> Object | None:
    try:
        return api.call("GET", path)
    except NotFound:
        return None


def pods_of(api: Api, native: Native) -> list[Object]:
    """The job's pods now."""
    return list(listed(api, api.path("v1", "pods", namespace=native.namespace), {"labelSelector": native.selector}))


def listed(api: Api, path: str, query: dict[str, str]) -> Iterator[Object]:
    """All objects of a collection that are asked for, a page at a time."""
    for answer in api.pages(path, query):
        yield from answer.get("items") or []


def _watched(api: Api, native: Native) -> tuple[Object, list[Object]] | None:
    """The job's object and pods; None when they must be queried: nobody watches, or what is seen would be final, which
    must be exact."""
    watcher = watching.running(api, native.namespace)
    seen = None if watcher is None else watcher.snapshot(native)
    if seen is None:
        return None
    workload, pods = seen
    # The watches of pods and of objects are two, and the one may be behind the other.
    if workload is None or states.status_of(workload, pods).state.final:
        return None
    return workload, pods


def _listed(api: Api, namespace: str, natives: Sequence[Native], *, ttl: bool) -> dict[str, Status]:
    workloads = _workloads(api, namespace, natives)
    there = [native for native in natives if native.name in workloads]
    pods: dict[str, list[Object]] = {}
    if there:
        for pod in listed(api, api.path("v1", "pods", namespace=namespace), {"labelSelector": _selector(there)}):
            pods.setdefault(((pod.get("metadata") or {}).get("labels") or {}).get(names.JOB_ID, ""), []).append(pod)
    mine = {native: _with_deleted(api, native, pods.get(names.label_value(native.job_id), [])) for native in there}
    found = _with_warnings(api, namespace, {native: (workloads[native.name], mine[native]) for native in there})
    return {str(native): found[native] if native in found else _gone(native, ttl=ttl) for native in natives}


def _with_warnings(api: Api, namespace: str, jobs: dict[Native, tuple[Object, list[Object]]]) -> dict[Native, Status]:
    """The status of each job, by its object and pods; of those that wait, also by what the cluster warned of."""
    found = {native: states.status_of(workload, pods) for native, (workload, pods) in jobs.items()}
    waiting = [
        native
        for native, status in found.items()
        if status.state is State.QUEUED or (not status.state.final and any(map(states.not_ready, jobs[native][1])))
    ]
    events = _warnings(api, namespace, {native: jobs[native][1] for native in waiting})
    for native in waiting:
        found[native] = states.status_of(*jobs[native], events.get(native, []))
    return found


def _with_deleted(api: Api, native: Native, pods: list[Object]) -> list[Object]:
    """The job's pods; where there are none any more, as they were last."""
    watcher = watching.running(api, native.namespace)
    return pods if pods or watcher is None else watcher.deleted_pods(native)


def _workloads(api: Api, namespace: str, natives: Sequence[Native]) -> dict[str, Object]:
    """By name; all of them of one kind."""
    if len(natives) == 1:
        only = workload_of(api, natives[0])
        return {} if only is None else {natives[0].name: only}
    path = api.path(natives[0].api_version, natives[0].plural, namespace=namespace)
    query = {"labelSelector": _selector(natives)}
    found = {str(each["metadata"]["name"]): each for each in listed(api, path, query)}
    # Somebody may have taken the label away: what is not in the list is asked for by its name before it is gone.
    for native in natives:
        if native.name not in found and (there := workload_of(api, native)) is not None:
            found[native.name] = there
    return found


def _warnings(api: Api, namespace: str, jobs: dict[Native, list[Object]]) -> dict[Native, list[Object]]:
    """What the cluster warned of about these jobs. Not being allowed to see it leaves the reasons out."""
    about = {native: watching.concerned(native, pods) for native, pods in jobs.items()}
    wanted = {name for each in about.values() for name in each}
    if not wanted:
        return {}
    path = api.path("v1", "events", namespace=namespace)
    few = sorted(wanted) if len(wanted) <= _FEW else [None]
    events: dict[str, list[Object]] = {}
    try:
        for name in few:
            query = {"fieldSelector": watching.WARNINGS + (f",involvedObject.name={name}" if name else _NOT_OF_USE)}
            for each in listed(api, path, query):
                events.setdefault(str((each.get("involvedObject") or {}).get("name")), []).append(each)
    except Forbidden as error:
        logger.warning("%s; why a job waits or stands still may be left out", one_line(str(error)))
    return {native: [event for name in mine for event in events.get(name, [])] for native, mine in about.items()}


def _selector(natives: Iterable[Native]) -> str:
    return names.selector_of(names.label_value(native.job_id) for native in natives)


def _gone(native: Native, *, ttl: bool) -> Status:
    message = f"its {native.kind} is gone: it was deleted, and not through accel"
    if ttl:
        message = f"its {native.kind} is gone: its ttl_s passed before anybody asked, or somebody deleted it"
    return Status(state=State.FAILED, reason=Reason.LOST, native_state="Deleted", message=message)


__all__ = ["listed", "pod_of", "pods_of", "statuses", "workload_of"]
