"""Idempotent creation of a job's objects: each is created once, even by repeated or interrupted submits.

All names derive from the job's id. An existing object is this job's if it has the digest of the one to create;
any other object of that name stays. API servers check quotas and webhooks before existence, so after any refusal
the object may exist:
https://github.com/kubernetes/kubernetes/issues/106842
"""

from __future__ import annotations

import contextlib
import functools
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
from .client.errors import ApiError, Conflict, Forbidden, NotFound, Unauthorized
from .manifests import build
from .manifests.code_delivery import Code, Object
from .manifests.workloads import BUILDERS, RUNTIME_KIND, RUNTIME_PLURAL
from .options import KubernetesOptions

_PLURALS: Mapping[str, str] = {
    **{builder.kind: builder.plural for builder in BUILDERS.values()},
    "ConfigMap": "configmaps",
    "Service": "services",
    "Pod": "pods",
    "PodGroup": "podgroups",
    RUNTIME_KIND: RUNTIME_PLURAL,
}
# The kinds that have an owner as soon as the job's object exists, and are deleted with it.
_OWNED_KINDS = ("ConfigMap", "Service")
_MERGE = "application/merge-patch+json"
# From Kubernetes 1.25 on, unknown fields are refused instead of dropped.
_STRICT = {"fieldValidation": "Strict", "fieldManager": "accel"}
_MAX_TRIES = 5
_GONE_S = 10.0  # for which a deleted object may take to be gone
# Transient refusals are retried for this long, with pauses that grow between these limits.
_TRANSIENT_S, _MIN_PAUSE_S, _MAX_PAUSE_S = 20.0, 0.1, 1.0
# Trainer looks for the job's own runtime in a cache, which may lag behind.
_NO_RUNTIME_YET = "specified trainingRuntime must be created before the TrainJob"

logger = logging.getLogger(__name__)
progress = logging.getLogger("schedulers.progress")


class NameTaken(SubmitError):
    """The name belongs to an object that is not this job's."""


class BeingDeleted(NameTaken):
    """The object is this job's and is being deleted."""


class CreateRejected(SubmitError):
    """The API server refused an object. `reason` is recorded with the job."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason = reason


def submit(
    api: Api, spec: JobSpec, options: KubernetesOptions, job_id: str, code: Code, data: bytes | None
) -> Mapping[str, Any]:
    """Create the job's object and everything that belongs to it. Return the object as the cluster has it.

    Raises SubmitError for a refusal, after removing everything that was created; Unreachable if the outcome is
    unknown or incomplete: a repeated call completes it.
    """
    manifests = build.build(spec, options, job_id, code, target=api.target, data=data)
    return _create_all(api, manifests, build.with_digest(manifests.workload, spec))


def _create_all(api: Api, manifests: build.Manifests, workload: Object) -> Mapping[str, Any]:
    created: list[Object] = []
    new = False
    try:
        for manifest in manifests.first:
            create(api, build.with_digest(manifest))
            created.append(manifest)
        live, new = _get_or_create(api, workload)
        created.append(workload)
        owner = _with_kind(live, workload)
        for manifest in manifests.first:
            _patch_owner(api, manifest, build.with_owner(manifest, owner)["metadata"]["ownerReferences"])
        for manifest in manifests.then:
            create(api, build.with_owner(build.with_digest(manifest), owner))
            created.append(manifest)
    except Unauthorized:
        raise
    except (ApiError, NameTaken, ConfigError) as error:
        refusal = create_rejected(error) if isinstance(error, ApiError) else error
        existing = None if new else _existing_workload(api, workload)
        if existing is not None and _has_started(api, existing):
            logger.warning("%s; the job runs from an earlier submit and was left unchanged", one_line(str(refusal)))
            return existing
        leftover = _remove(api, created if existing is None else [*created, workload])
        if leftover:
            # The job may run, so its outcome is unknown.
            raise Unreachable(f"{refusal}; {leftover} was created and is not deleted yet") from None
        raise refusal from None
    return owner


def create(api: Api, manifest: Object) -> dict[str, Any]:
    """Return the object as the cluster has it; create it if needed. Raises NameTaken, ApiError, Unreachable."""
    return _get_or_create(api, manifest)[0]


def _get_or_create(api: Api, manifest: Object) -> tuple[dict[str, Any], bool]:
    """Return the object, and True if this call certainly created it."""
    for _ in range(_MAX_TRIES):
        try:
            return _post_with_retries(api, manifest), True
        except ApiError as error:
            already_exists = isinstance(error, Conflict) and error.api_reason == "AlreadyExists"
            try:
                live = api.get_or_none(path_of(api, manifest))
            except Forbidden as forbidden:
                raise forbidden if already_exists else error from None
            if live is not None:
                return _check_ours(api, manifest, live), False
            if not already_exists:
                raise
    raise Unreachable(f"{api.label}: {object_label(manifest)} is deleted again and again by something else")


def _post_with_retries(api: Api, manifest: Object) -> dict[str, Any]:
    """Post the object, with retries while the refusal is transient."""
    deadline, pause = time.monotonic() + _TRANSIENT_S, _MIN_PAUSE_S
    while True:
        try:
            return _post(api, manifest)
        except ApiError as error:
            # Transient are a conflict at a quota (kubernetes/kubernetes#67761), and no runtime yet.
            at_quota = isinstance(error, Conflict) and error.api_reason == "Conflict"
            if not (at_quota or lacks_runtime(error)) or time.monotonic() > deadline:
                raise
        time.sleep(pause * random.uniform(0.5, 1.5))
        pause = min(_MAX_PAUSE_S, 2 * pause)


def lacks_runtime(error: ApiError) -> bool:
    """Return True if Trainer's webhook refuses a TrainJob because it sees no TrainingRuntime of that name.

    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/core/trainingruntime.go (`ValidateObjects`)
    """
    return _NO_RUNTIME_YET in str(error)


def _post(api: Api, manifest: Object) -> dict[str, Any]:
    def on_warning(text: str) -> None:
        progress.warning("%s", warning(api, manifest, text))

    path = list_of(api, manifest)
    post = functools.partial(api.call, "POST", path, body=manifest, query=_STRICT, on_warning=on_warning)
    try:
        return post()
    except Unreachable:
        return post()  # if the first request arrived, this one is refused because the object exists


def warning(api: Api, manifest: Object, text: str) -> str:
    """Format a warning from the API server's response as one line."""
    return one_line(f"{api.label}: {object_label(manifest)}: the API server warns: {text}")


def _existing_workload(api: Api, workload: Object) -> Object | None:
    """Return the job's object if an earlier submit created it, else None. Raises Unreachable."""
    try:
        live = api.get_or_none(path_of(api, workload))
        return None if live is None else _with_kind(_check_ours(api, workload, live), workload)
    except (ApiError, NameTaken):
        return None


def _has_started(api: Api, workload: Object) -> bool:
    """Return True if a pod has started or the pods cannot be listed."""
    from .status import job_states  # only a refused submit needs it

    query = {"labelSelector": f"{names.JOB_ID}={workload['metadata']['labels'][names.JOB_ID]}"}
    try:
        pods = list(api.items(api.path("v1", "pods"), query))
    except ApiError:
        return True
    return job_states.status_of(workload, pods).state is not State.QUEUED


def _with_kind(live: Mapping[str, Any], manifest: Object) -> dict[str, Any]:
    """Add API version and kind, which servers omit in lists, and some also in single objects."""
    return {**live, "apiVersion": manifest["apiVersion"], "kind": manifest["kind"]}


def _check_ours(api: Api, manifest: Object, live: dict[str, Any]) -> dict[str, Any]:
    digest = (live["metadata"].get("annotations") or {}).get(names.DIGEST)
    if digest != manifest["metadata"]["annotations"][names.DIGEST]:
        origin = "accel created it for another purpose" if digest else "accel did not create it"
        raise NameTaken(
            f"{api.label}: {object_label(manifest)} exists already and is not this job's ({origin}); "
            "it was left unchanged"
        )
    if live["metadata"].get("deletionTimestamp"):
        raise BeingDeleted(f"{api.label}: {object_label(manifest)} is being deleted by something else")
    owners = manifest["metadata"].get("ownerReferences")
    if owners and live["metadata"].get("ownerReferences") != owners:
        # Its owner is an earlier object of the same name, with which it would be removed.
        return _patch_owner(api, manifest, owners)
    return live


def _patch_owner(api: Api, manifest: Object, owners: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    body = {"metadata": {"ownerReferences": owners}}
    return api.call("PATCH", path_of(api, manifest), body=body, content_type=_MERGE)


def delete(api: Api, manifest: Object) -> None:
    """Delete an object, which need not exist. Raises ApiError, Unreachable."""
    with contextlib.suppress(NotFound):
        api.call("DELETE", path_of(api, manifest), query={"propagationPolicy": "Background"})


def _remove(api: Api, manifests: Sequence[Object]) -> str | None:
    """Delete the objects in reverse order. Return the name of one that has no owner and is not gone, else None."""
    leftover = None
    for manifest in reversed(manifests):
        owned = manifest["kind"] in _OWNED_KINDS
        try:
            delete(api, manifest)
            gone = owned or _is_gone(api, manifest)
        except SchedulerError:
            gone = owned
        leftover = leftover if gone else object_label(manifest)
    return leftover


def _is_gone(api: Api, manifest: Object) -> bool:
    """Wait until a deleted object is gone, which its finalizers may delay. Return False if it stays."""
    deadline = time.monotonic() + _GONE_S
    while (live := api.get_or_none(path_of(api, manifest))) is not None and live["metadata"].get("deletionTimestamp"):
        if time.monotonic() > deadline:
            return False
        time.sleep(_MIN_PAUSE_S)
    return True  # also if a later object has the name


def list_of(api: Api, manifest: Mapping[str, Any]) -> str:
    """Return the collection path of the object's kind."""
    return api.path(manifest["apiVersion"], _PLURALS[manifest["kind"]])


def path_of(api: Api, manifest: Mapping[str, Any]) -> str:
    return api.path(manifest["apiVersion"], _PLURALS[manifest["kind"]], manifest["metadata"]["name"])


def object_label(manifest: Mapping[str, Any]) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def create_rejected(error: ApiError, message: str | None = None) -> CreateRejected:
    """Return `CreateRejected`: NO_CAPACITY for an exceeded quota, else SETUP. `message` replaces the error's own."""
    full = isinstance(error, Forbidden) and "exceeded quota" in str(error)
    return CreateRejected(message or str(error), Reason.NO_CAPACITY if full else Reason.SETUP)
