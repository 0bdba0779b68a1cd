"""Discover jobs that another machine submitted, by their label. An annotation holds the job spec."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from ..errors import SpecError, UnknownJob
from ..job import JobSpec
from ..target import DiscoveredJob, JobSummary
from . import names
from .client.api import Api
from .client.errors import Forbidden, NotFound
from .manifests.build import TARGET_KIND
from .manifests.workloads import BUILDERS
from .native_id import Native
from .options import KubernetesOptions
from .status import job_states, pod_states


def find(api: Api, options: KubernetesOptions, job_id: str) -> DiscoveredJob | None:
    """Find a job in the target's namespace, the target's kind of workload first. Raises UnknownJob, request errors."""
    kinds = sorted(BUILDERS, key=lambda kind: kind != options.workload)
    for kind in kinds:
        for workload in list_workloads(api, kind, names.selector(job_id), requested=kind == options.workload):
            return _discovered_job(api, kind, workload, job_id)
    return None


def list_workloads(api: Api, kind: str, selector: str, *, requested: bool) -> list[dict[str, Any]]:
    """Return a kind's matching workloads; none if the cluster lacks the kind or, unless `requested`, forbids it."""
    builder = BUILDERS[kind]
    ignored = (NotFound,) if requested else (NotFound, Forbidden)
    with contextlib.suppress(*ignored):
        path = api.path(builder.api_version, builder.plural)
        return list(api.items(path, {"labelSelector": selector}))
    return []


def _discovered_job(api: Api, kind: str, workload: dict[str, Any], job_id: str) -> DiscoveredJob:
    metadata = workload["metadata"]
    text = (metadata.get("annotations") or {}).get(names.SPEC)
    if text is None:
        raise UnknownJob(
            f"{api.label}: {BUILDERS[kind].kind} {metadata['name']} has the label of job {job_id} but no annotation "
            f"{names.SPEC}: accel submit did not create it"
        )
    created_at = pod_states.moment(metadata.get("creationTimestamp"))
    return DiscoveredJob.of(
        str(Native.of(kind, metadata, job_id)), lambda: json.loads(text), target=api.target, kind=TARGET_KIND,
        job_id=job_id, whole=False, created_at=created_at,
    )  # fmt: skip


def jobs(api: Api, options: KubernetesOptions) -> list[JobSummary]:
    """Return all jobs with accel's label in the target's namespace, of every kind of workload that we may read.

    The target's own kind must be readable. Raises request errors.
    """
    summaries: dict[str, JobSummary] = {}
    for kind in BUILDERS:
        for workload in list_workloads(api, kind, names.JOB_ID, requested=kind == options.workload):
            if not _is_owned(workload):
                job = _job_summary(kind, workload)
                summaries.setdefault(job.job_id, job)
    return list(summaries.values())


def _job_summary(kind: str, workload: dict[str, Any]) -> JobSummary:
    """Return a summary, with name and nodes from the annotation, else from the labels and the object."""
    metadata = workload["metadata"]
    job_id, name = metadata["labels"][names.JOB_ID], metadata["labels"].get(names.NAME) or metadata["name"]
    nodes = job_states.nodes_of(workload) or 1
    with contextlib.suppress(KeyError, ValueError, SpecError, RecursionError):
        spec = JobSpec.from_json(json.loads(metadata["annotations"][names.SPEC]))
        name, nodes = spec.name, spec.nodes
    native, created_at = Native.of(kind, metadata, job_id), pod_states.moment(metadata.get("creationTimestamp"))
    return JobSummary(job_id=job_id, native_id=str(native), name=name, nodes=nodes, created_at=created_at or 0.0)


def _is_owned(workload: dict[str, Any]) -> bool:
    """Return True for the JobSet of a TrainJob and the Job of a JobSet, which may inherit their labels."""
    kinds = {builder.kind for builder in BUILDERS.values()}
    owners = workload["metadata"].get("ownerReferences") or []
    return any(owner.get("controller") and owner.get("kind") in kinds for owner in owners)
