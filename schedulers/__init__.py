"""Job submission and monitoring: what to run (`JobSpec`), where (`Target`), and the jobs (`Job`, `Store`).

Needs no torch and never imports `accel`. Every name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        ConfigError,
        JobFailed,
        SchedulerError,
        SnapshotError,
        SpecError,
        StoreError,
        SubmitError,
        UnknownJob,
        UnknownTarget,
        Unreachable,
    )
    from .job import Cursor, JobSpec, LogLine, Reason, Resources, Retry, State, Status
    from .jobs.handle import Job, dry_run, find, list_jobs, submit, submit_async, submit_spec
    from .store.store import Store
    from .target import Plan, Target
    from .topology import Topology

__all__ = [
    "ConfigError",
    "Cursor",
    "Job",
    "JobFailed",
    "JobSpec",
    "LogLine",
    "Plan",
    "Reason",
    "Resources",
    "Retry",
    "SchedulerError",
    "SnapshotError",
    "SpecError",
    "State",
    "Status",
    "Store",
    "StoreError",
    "SubmitError",
    "Target",
    "Topology",
    "UnknownJob",
    "UnknownTarget",
    "Unreachable",
    "dry_run",
    "find",
    "list_jobs",
    "submit",
    "submit_async",
    "submit_spec",
]

_MODULES = {
    "errors": "ConfigError JobFailed SchedulerError SnapshotError SpecError StoreError SubmitError UnknownJob "
    "UnknownTarget Unreachable",
    "jobs.handle": "Job dry_run find list_jobs submit submit_async submit_spec",
    "job": "Cursor JobSpec LogLine Reason Resources Retry State Status",
    "store.store": "Store",
    "target": "Plan Target",
    "topology": "Topology",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
