"""A job that another machine submitted: found by its label, and what it is by an annotation."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ..errors import SchedulerError, SpecError, UnknownJob
from ..job import JobSpec
from ..target import Found, Plan
from . import names
from .api import Api
from .errors import Forbidden, NotFound
from .manifests import BUILDERS
from .native import Native
from .options import KubernetesOptions
from .planning import KIND


def find(api: Api, options: KubernetesOptions, job_id: str) -> Found | None:
    """Looks in the target's namespace, for the target's own kind of workload first. Raises what asking raises."""
    kinds = sorted(BUILDERS, key=lambda kind: kind != options.workload)
    for kind in kinds:
        for each in listed(api, kind, names.selector(job_id), asked=kind == options.workload):
            return _found(api, kind, each, job_id)
    return None


def listed(api: Api, kind: str, selector: str, *, asked: bool) -> list[dict[str, Any]]:
    """The workloads of a kind that have the labels; none where the cluster does not know the kind. One that was not
    asked for (`asked`) may be forbidden as well."""
    builder = BUILDERS[kind]
    passed = (NotFound,) if asked else (NotFound, Forbidden)
    with contextlib.suppress(*passed):
        query = {"labelSelector": selector}
        return list(api.call("GET", api.path(builder.API_VERSION, builder.PLURAL), query=query).get("items") or [])
    return []


def _found(api: Api, kind: str, workload: dict[str, Any], job_id: str) -> Found:
    metadata = workload["metadata"]
    text = (metadata.get("annotations") or {}).get(names.SPEC)
    if text is None:
        raise UnknownJob(
            f"{api.where}: {BUILDERS[kind].KIND} {metadata['name']} has the label of job {job_id}, and no annotation "
            f"{names.SPEC}: accel submit did not make it"
        )
    try:
        said = json.loads(text)
        spec = JobSpec.from_json(said)
    except (ValueError, SpecError) as error:
        raise SchedulerError(f"another version of accel submitted job {job_id}: {error}") from None
    plan = Plan(
        target=api.target,
        kind=KIND,
        job_id=job_id,
        files={"kubernetes/spec.json": json.dumps(said, indent=2) + "\n"},
        settings={"spec": said},
        warnings=("submitted by another machine: this is what it asked for",),
    )
    native = Native(kind, str(metadata["namespace"]), str(metadata["name"]), job_id)
    return Found(native_id=str(native), spec=spec, plan=plan, whole=False)
