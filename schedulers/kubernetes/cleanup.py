"""Cancel jobs, find what still runs of them, and remove finished ones and the leftovers of interrupted submits."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SchedulerError
from ..printable import one_line
from . import names
from .client.api import Api
from .client.errors import ApiError, Forbidden, NotFound
from .manifests.build import POD_GROUP
from .manifests.workloads import BUILDERS, RUNTIME_API_VERSION, RUNTIME_PLURAL
from .native_id import Native
from .options import KubernetesOptions
from .status import job_states, pod_states, query

_BATCH_SIZE = 50  # ids in one selector: it is part of a URL

logger = logging.getLogger(__name__)


def cancel(api: Api, native: Native, directory: Path) -> None:
    """Archive the logs and delete the job's object. Do nothing if the job is gone.

    A later object of the same name stays. Raises ApiError, Unreachable.

    Deletes in the background: a foreground deletion ends with an UPDATE, which Trainer's webhook refuses since
    the runtime is gone by then. This also frees an object that an earlier deletion left behind.
    """
    from .logs.archive import archive_job

    if query.replaced(api, native):
        return
    warning = archive_job(api, native, directory)
    if warning:
        logger.warning("%s", one_line(warning))
    path = api.path(native.api_version, native.plural, native.name, namespace=native.namespace)
    with contextlib.suppress(NotFound):
        api.call("DELETE", path, query={"propagationPolicy": "Background"})


def cancel_rest(api: Api, native: Native, directory: Path) -> bool:
    """Cancel a finished job if one of its pods still runs; return True if one does.

    The pods of a failed PyTorchJob may. Raises ApiError, Unreachable.
    """
    pods = query.pods_of(api, native)
    if not any(pod_states.is_alive(pod, api.now()) for pod in pods) or query.replaced(api, native):
        return False
    cancel(api, native, directory)
    return True


def running(api: Api, jobs: Sequence[Native]) -> dict[str, str]:
    """Return what has not ended of each of these jobs: its object or a pod. Lists each kind once per namespace.

    Raises ApiError, Unreachable.
    """
    by_namespace: dict[str, dict[str, Native]] = {}
    for native in jobs:
        by_namespace.setdefault(native.namespace, {})[names.label_value(native.job_id)] = native
    unfinished: dict[str, str] = {}
    for namespace, by_label in by_namespace.items():
        selector = names.selector_of(by_label) if len(by_label) <= _BATCH_SIZE else names.JOB_ID
        for builder in {BUILDERS[native.workload] for native in by_label.values()}:
            with contextlib.suppress(NotFound):  # the cluster no longer has the kind
                path = api.path(builder.api_version, builder.plural, namespace=namespace)
                for label, workload in _items(api, path, selector, by_label):
                    if by_label[label].kind != builder.kind:  # the JobSet of a TrainJob has its label
                        continue
                    if not by_label[label].owns(workload):
                        del by_label[label]  # its pods belong to the later object of that name
                    elif not job_states.status_of({**workload, "kind": builder.kind}).state.final:
                        unfinished[by_label[label].job_id] = (
                            f"{builder.kind} {workload['metadata']['name']} has not ended"
                        )
        for label, pod in _items(api, api.path("v1", "pods", namespace=namespace), selector, by_label):
            if pod_states.is_alive(pod, api.now()):
                unfinished.setdefault(by_label[label].job_id, f"pod {pod['metadata']['name']} has not ended")
    return unfinished


def _items(api: Api, path: str, selector: str, by_label: Mapping[str, Native]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the label value and the object of each listed object of these jobs."""
    for item in api.items(path, {"labelSelector": selector}):
        if (label := item["metadata"]["labels"][names.JOB_ID]) in by_label:
            yield label, item


def clear(api: Api, options: KubernetesOptions, jobs: Sequence[Native]) -> list[str]:
    """Delete the jobs' objects. Return a line for each job that could not be cleared."""
    groups: dict[tuple[str, str], list[Native]] = {}
    for native in jobs:
        groups.setdefault((native.workload, native.namespace), []).append(native)
    remaining: dict[str, str] = {}
    for group in groups.values():
        for start in range(0, len(group), _BATCH_SIZE):
            batch = group[start : start + _BATCH_SIZE]
            try:
                _clear(api, options, batch, remaining)
            except SchedulerError as error:
                remaining |= {native.job_id: str(error) for native in batch if native.job_id not in remaining}
    return [
        f"job {job} not deleted on {api.label}: {problem.removeprefix(f'{api.label}: ')}"
        for job, problem in remaining.items()
    ]


def _clear(api: Api, options: KubernetesOptions, jobs: Sequence[Native], remaining: dict[str, str]) -> None:
    """Clear jobs of one kind and one namespace, all of them over. `remaining`: job id -> why it stays."""
    first = jobs[0]
    by_label = {names.label_value(native.job_id): native for native in jobs}
    list_path = api.path(first.api_version, first.plural, namespace=first.namespace)
    with contextlib.suppress(NotFound):  # the cluster no longer has the kind
        for label, workload in _items(api, list_path, names.selector_of(by_label), by_label):
            if by_label[label].owns(workload):
                _delete(api, f"{list_path}/{workload['metadata']['name']}", by_label[label].job_id, remaining)
            else:  # a later object has the name: it and everything with the label belong to another job
                del by_label[label]
    removed = [native for native in by_label.values() if native.job_id not in remaining]
    for path, job in (*_objects_by_name(api, options, removed), *_labelled(api, options, first, by_label)):
        if job not in remaining:
            _delete(api, path, job, remaining)


def _delete(api: Api, path: str, job: str, remaining: dict[str, str]) -> None:
    try:
        api.call("DELETE", path, query={"propagationPolicy": "Background"})
    except NotFound:
        return
    except ApiError as error:
        remaining[job] = str(error)


def _objects_by_name(api: Api, options: KubernetesOptions, jobs: Sequence[Native]) -> Iterator[tuple[str, str]]:
    """Yield (path, job id) of objects that have the name of the job's object and were created before it."""
    for native in jobs:
        if native.workload == "trainjob" and options.runtime is None:
            yield api.path(RUNTIME_API_VERSION, RUNTIME_PLURAL, native.name, namespace=native.namespace), native.job_id
        if options.volcano_queue is not None and native.workload in ("job", "jobset"):
            yield api.path(POD_GROUP, "podgroups", native.name, namespace=native.namespace), native.job_id


def _labelled(
    api: Api, options: KubernetesOptions, native: Native, jobs: Mapping[str, Native]
) -> Iterator[tuple[str, str]]:
    """Yield (path, job id) of objects without an owner. `jobs`: label value -> native id."""
    if not jobs:
        return
    plurals = ["services"]
    plurals += ["configmaps"] if options.code in ("auto", "configmap") else []
    plurals += ["pods"] if options.code_claim is not None else []
    for plural in plurals:
        list_path = api.path("v1", plural, namespace=native.namespace)
        with contextlib.suppress(Forbidden):  # without this permission none were created
            for label, resource in _items(api, list_path, names.selector_of(jobs), jobs):
                if not resource["metadata"].get("ownerReferences"):
                    yield f"{list_path}/{resource['metadata']['name']}", jobs[label].job_id
