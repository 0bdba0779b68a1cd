"""Makes a job's objects: once, however often it is asked and wherever it is cut off.

All names come from the job's id. An object that is there already is this job's when it has the digest that ours would
have; anything else of that name is somebody else's and stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, SchedulerError, SubmitError, Unreachable
from ..job import JobSpec, Reason
from . import manifests, names
from .api import Api
from .code import Code, Object
from .errors import ApiError, Conflict, Forbidden, NotFound
from .manifests import BUILDERS
from .options import KubernetesOptions
from .trainjob import RUNTIME_KIND, RUNTIME_PLURAL

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


class Taken(SubmitError):
    """The name is taken by something that is not this job's."""


class Leaving(Taken):
    """It is this job's, and is being removed."""


class Refused(SubmitError):
    """By the API server; `reason` as it is recorded with the job."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


def submit(
    api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str, code: Code, data: bytes | None
) -> Mapping[str, Any]:
    """The job's object, as the cluster has it, with everything that belongs to it.

    Raises SubmitError for a refusal, after everything that was made is removed again; Unreachable when it cannot be
    told, or not be finished: the same call carries it out.
    """
    made = manifests.build(spec, options, job_id, code, target=api.target, data=data)
    return _all(api, made, spec)


def _all(api: Api, made: manifests.Manifests, spec: JobSpec) -> Mapping[str, Any]:
    done: list[Object] = []
    try:
        for each in made.first:
            create(api, manifests.stamped(each))
            done.append(each)
        workload = create(api, manifests.stamped(made.workload, spec))
        done.append(made.workload)
        # Lists have their items' kinds left out, and some servers those of single objects.
        owner = {**workload, "apiVersion": made.workload["apiVersion"], "kind": made.workload["kind"]}
        for each in made.first:
            _own(api, each, owner)
        for each in made.then:
            create(api, manifests.owned(manifests.stamped(each), owner))
            done.append(each)
    except (ApiError, Taken, ConfigError) as error:
        refusal = _refusal(api, error) if isinstance(error, ApiError) else error
        left = _remove(api, done)
        if left:
            # It may run: neither failed nor gone, until somebody has the answer.
            raise Unreachable(f"{refusal}; {left} is there and could not be removed again") from None
        raise refusal from None
    return owner


def create(api: Api, made: Object) -> dict[str, Any]:
    """The object as the cluster has it, now or since an earlier submit of the same. Raises Taken, ApiError,
    Unreachable."""
    for _ in range(_TIMES):
        try:
            return _post(api, made)
        except Conflict as error:
            if error.word != "AlreadyExists":
                raise
        with contextlib.suppress(NotFound):  # removed between the two
            there = api.call("GET", path_of(api, made))
            return _ours(api, made, there)
    raise Unreachable(f"{api.where}: {called(made)} comes and goes: somebody else removes it again and again")


def _post(api: Api, made: Object) -> dict[str, Any]:
    at = list_of(api, made)
    try:
        return api.call("POST", at, body=made, query=_STRICT)
    except Unreachable:
        # If the first one got through, the second is told that it is there.
        return api.call("POST", at, body=made, query=_STRICT)


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
    """What was made before the job's object goes with it from now on."""
    _patch_owner(api, made, manifests.owned(made, owner)["metadata"]["ownerReferences"])


def _patch_owner(api: Api, made: Object, owners: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    body = {"metadata": {"ownerReferences": owners}}
    return api.call("PATCH", path_of(api, made), body=body, content_type=_MERGE)


def delete(api: Api, made: Object) -> None:
    """Removes an object that need not be there. Raises ApiError, Unreachable."""
    with contextlib.suppress(NotFound):
        api.call("DELETE", path_of(api, made), query={"propagationPolicy": "Background"})


def _remove(api: Api, made: Sequence[Object]) -> str | None:
    """What this submit made, the last first. Returns what of it stays, and will not go with something else."""
    left = None
    for each in reversed(made):
        try:
            delete(api, each)
        except SchedulerError:
            if each["kind"] not in _OWNED:
                left = called(each)
    return left


def list_of(api: Api, made: Mapping[str, Any]) -> str:
    """Where objects like this one are made."""
    return api.path(made["apiVersion"], _PLURALS[made["kind"]])


def path_of(api: Api, made: Mapping[str, Any]) -> str:
    return api.path(made["apiVersion"], _PLURALS[made["kind"]], made["metadata"]["name"])


def called(made: Mapping[str, Any]) -> str:
    return f"{made['kind']} {made['metadata']['name']}"


def _refusal(api: Api, error: ApiError) -> SchedulerError:
    if isinstance(error, NotFound) and error.details.get("kind") == "namespaces":
        return Refused(f"{api.where}: there is no namespace {api.namespace} (namespace: in accel.yaml)", Reason.SETUP)
    full = isinstance(error, Forbidden) and "exceeded quota" in str(error)
    return Refused(str(error), Reason.NO_CAPACITY if full else Reason.SETUP)
