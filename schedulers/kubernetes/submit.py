"""Idempotent creation of a job's objects: each is created once, even by repeated or interrupted submits.

All names derive from the job's id. An existing object is this job's if it has the digest that ours would
have; any other object of that name belongs to somebody else and stays. API servers check quotas and webhooks
before existence, so any refusal may be of an existing object:
https://github.com/kubernetes/kubernetes/issues/106842
"""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, SchedulerError, SubmitError, Unreachable
from ..job import JobSpec, Reason, State
from ..printable import one_line
from . import names
from .client.api import Api
from .client.errors import ApiError, Conflict, Forbidden, NotFound
from .manifests import build
from .manifests.build import BUILDERS
from .manifests.code_delivery import Code, Object
from .manifests.trainjob import RUNTIME_KIND, RUNTIME_PLURAL
from .options import KubernetesOptions

_OTHERS: Mapping[str, str] = {
    "ConfigMap": "configmaps",
    "Service": "services",
    "Pod": "pods",
    "PodGroup": "podgroups",
    RUNTIME_KIND: RUNTIME_PLURAL,
}
# What goes with the job's object as soon as it is made.
_OWNED = ("ConfigMap", "Service")
_PLURALS = {**{builder.KIND: builder.PLURAL for builder in BUILDERS.values()}, **_OTHERS}
_MERGE = "application/merge-patch+json"
# What is made that a field the cluster does not know is refused, and not dropped (from Kubernetes 1.25 on).
_STRICT = {"fieldValidation": "Strict", "fieldManager": "accel"}
_TIMES = 5
# What is refused for a moment only is asked for again, for so long, after pauses of about so much.
_PASSING_S, _FIRST_S, _LAST_S = 20.0, 0.1, 1.0
# Trainer looks for the runtime in a cache, which follows what was made a moment ago.
_NO_RUNTIME_YET = "must be created before the TrainJob"

logger = logging.getLogger(__name__)
progress = logging.getLogger("schedulers.progress")


class Taken(SubmitError):
    """The name belongs to an object that is not this job's."""


class Leaving(Taken):
    """The object is this job's and is being deleted."""


class Refused(SubmitError):
    """The API server refused an object. `reason` is recorded with the job."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


def submit(
    api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str, code: Code, data: bytes | None
) -> Mapping[str, Any]:
    """Create the job's object and everything that belongs to it. Return the object as the cluster has it.

    Raises SubmitError for a refusal, after removing everything that was created; Unreachable when the outcome is
    unknown or incomplete: the same call completes it.
    """
    made = build.build(spec, options, job_id, code, target=api.target, data=data)
    return _all(api, made, build.stamped(made.workload, spec))


def _all(api: Api, made: build.Manifests, workload: Object) -> Mapping[str, Any]:
    done: list[Object] = []
    new = False
    try:
        for each in made.first:
            create(api, build.stamped(each))
            done.append(each)
        there, new = _created(api, workload)
        done.append(workload)
        owner = _whole(there, workload)
        for each in made.first:
            _own(api, each, owner)
        for each in made.then:
            create(api, build.owned(build.stamped(each), owner))
            done.append(each)
    except (ApiError, Taken, ConfigError) as error:
        refusal = refused(error) if isinstance(error, ApiError) else error
        earlier = None if new else _earlier(api, workload)
        if earlier is not None and _has_begun(api, earlier):
            logger.warning("%s; the job runs since an earlier submit, and is left as it is", one_line(str(refusal)))
            return earlier
        left = _remove(api, done if earlier is None else [*done, workload])
        if left:
            # It may run: neither failed nor gone, until somebody has the answer.
            raise Unreachable(f"{refusal}; {left} is there and could not be removed again") from None
        raise refusal from None
    return owner


def create(api: Api, made: Object) -> dict[str, Any]:
    """Return the object as the cluster has it; create it if needed. Raises Taken, ApiError, Unreachable."""
    return _created(api, made)[0]


def _created(api: Api, made: Object) -> tuple[dict[str, Any], bool]:
    """Return the object, and True if this call created it for certain."""
    for _ in range(_TIMES):
        try:
            return _posted(api, made), True
        except ApiError as error:
            known = isinstance(error, Conflict) and error.word == "AlreadyExists"
            try:
                there = _there(api, made)
            except Forbidden as blind:
                raise blind if known else error from None
            if there is not None:
                return _ours(api, made, there), False
            if not known:
                raise
    raise Unreachable(f"{api.where}: {called(made)} comes and goes: somebody else removes it again and again")


def _posted(api: Api, made: Object) -> dict[str, Any]:
    """Post the object, with retries while the refusal is transient."""
    deadline, pause = time.monotonic() + _PASSING_S, _FIRST_S
    while True:
        try:
            return _post(api, made)
        except ApiError as error:
            if not _passes(error) or time.monotonic() > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(_LAST_S, 2 * pause)


def _passes(error: ApiError) -> bool:
    """Return True for a transient refusal: a conflict at a quota (kubernetes/kubernetes#67761), or no runtime yet."""
    return (isinstance(error, Conflict) and error.word == "Conflict") or lacks_runtime(error)


def lacks_runtime(error: ApiError) -> bool:
    """Return True if Trainer's webhook refuses a TrainJob because it sees no runtime of that name.

    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/core/trainingruntime.go (`ValidateObjects`)
    """
    return _NO_RUNTIME_YET in str(error)


def _post(api: Api, made: Object) -> dict[str, Any]:
    at = list_of(api, made)

    def warned(text: str) -> None:
        progress.warning("%s", warning(api, made, text))

    try:
        return api.call("POST", at, body=made, query=_STRICT, warned=warned)
    except Unreachable:
        # If the first one got through, the second is told that it is there, or refused.
        return api.call("POST", at, body=made, query=_STRICT, warned=warned)


def warning(api: Api, made: Object, text: str) -> str:
    """Format a warning from the API server's response as one line."""
    return one_line(f"{api.where}: {called(made)}: the API server warns: {text}")


def _there(api: Api, made: Object) -> dict[str, Any] | None:
    """Return the existing object of that name, or None."""
    try:
        return api.call("GET", path_of(api, made))
    except NotFound:
        return None


def _earlier(api: Api, workload: Object) -> Object | None:
    """Return the job's object if an earlier submit created it, else None. Raises Unreachable."""
    try:
        there = _there(api, workload)
        return None if there is None else _whole(_ours(api, workload, there), workload)
    except (ApiError, Taken):
        return None


def _has_begun(api: Api, workload: Object) -> bool:
    """Return True if a pod has started or the pods cannot be listed. Missing objects would then come too late."""
    from .status import job_states
    from .status import query as queries  # of no use to a submit that is taken

    query = {"labelSelector": f"{names.JOB_ID}={workload['metadata']['labels'][names.JOB_ID]}"}
    try:
        pods = list(queries.listed(api, api.path("v1", "pods"), query))
    except ApiError:
        return True
    return job_states.status_of(workload, pods).state is not State.QUEUED


def _whole(there: Mapping[str, Any], made: Object) -> dict[str, Any]:
    """Add API version and kind, which servers omit in lists and some in single objects."""
    return {**there, "apiVersion": made["apiVersion"], "kind": made["kind"]}


def _ours(api: Api, made: Object, there: dict[str, Any]) -> dict[str, Any]:
    digest = (there["metadata"].get("annotations") or {}).get(names.DIGEST)
    if digest != made["metadata"]["annotations"][names.DIGEST]:
        whose = "accel made it, for something else" if digest else "accel did not make it"
        raise Taken(f"{api.where}: {called(made)} is there already, and is not this job's ({whose}); it stays as it is")
    if there["metadata"].get("deletionTimestamp"):
        raise Leaving(f"{api.where}: {called(made)} is being deleted, and not by this submit")
    wanted = made["metadata"].get("ownerReferences")
    if wanted and there["metadata"].get("ownerReferences") != wanted:
        # Of an earlier object of the same name: it would be removed with that one.
        return _patch_owner(api, made, wanted)
    return there


def _own(api: Api, made: Object, owner: Mapping[str, Any]) -> None:
    """Make the job's object the owner of an object created before it."""
    _patch_owner(api, made, build.owned(made, owner)["metadata"]["ownerReferences"])


def _patch_owner(api: Api, made: Object, owners: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    body = {"metadata": {"ownerReferences": owners}}
    return api.call("PATCH", path_of(api, made), body=body, content_type=_MERGE)


def delete(api: Api, made: Object) -> None:
    """Delete an object, which need not exist. Raises ApiError, Unreachable."""
    with contextlib.suppress(NotFound):
        api.call("DELETE", path_of(api, made), query={"propagationPolicy": "Background"})


def _remove(api: Api, made: Sequence[Object]) -> str | None:
    """Delete the objects, the last first. Return the name of one that stays and has no owner, else None."""
    left = None
    for each in reversed(made):
        try:
            delete(api, each)
        except SchedulerError:
            if each["kind"] not in _OWNED:
                left = called(each)
    return left


def list_of(api: Api, made: Mapping[str, Any]) -> str:
    """Return the collection path of the object's kind."""
    return api.path(made["apiVersion"], _PLURALS[made["kind"]])


def path_of(api: Api, made: Mapping[str, Any]) -> str:
    return api.path(made["apiVersion"], _PLURALS[made["kind"]], made["metadata"]["name"])


def called(made: Mapping[str, Any]) -> str:
    return f"{made['kind']} {made['metadata']['name']}"


def refused(error: ApiError, message: str | None = None) -> Refused:
    """Return `Refused`: NO_CAPACITY for an exceeded quota, else SETUP. `message` replaces the error's own."""
    full = isinstance(error, Forbidden) and "exceeded quota" in str(error)
    return Refused(message or str(error), Reason.NO_CAPACITY if full else Reason.SETUP)
