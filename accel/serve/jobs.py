"""Rows of jobs: the request, its submitter, and a copy of the job's record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import RowMapping, delete, select, update

from schedulers.convert import parse_json
from schedulers.errors import StoreError, StoreNotWritable
from schedulers.job import JobSpec, Reason, State, Status
from schedulers.jobs.handle import Job
from schedulers.jobs.prune import prune
from schedulers.printable import one_line
from schedulers.store import atomic_files
from schedulers.store.record import Record

from . import auth
from .auth import Caller
from .context import ServeContext
from .problems import Problem
from .tables import job

Row = RowMapping

FINAL = tuple(state.value for state in State if state.final)

_ORPHANED_S = 600.0  # of secrets without a job: a request may just be checked


class JobStatus(BaseModel):
    """The status when the job's target last answered."""

    state: str
    reason: str
    exit_code: int | None
    attempt: int
    message: str
    native_state: str
    observed_at: float


class JobView(BaseModel):
    """A job. Times are seconds since the epoch. `warning`: why the status may be old."""

    id: str
    name: str
    owner: str
    project: str
    target: str
    kind: str
    nodes: int
    gpus: int
    created_at: float
    started_at: float | None
    ended_at: float | None
    native_id: str | None
    warning: str
    cancel_asked: bool
    status: JobStatus


def view(row: Row) -> JobView:
    """Return what the API shows of a job; `status` is in the form of `Status.to_json`."""
    return JobView(**{**row, "cancel_asked": row["cancel_asked"] is not None, "status": JobStatus(**row)})


def get(context: ServeContext, job_id: str) -> Row:
    """Return the job's row. Raises Problem with status 404."""
    row = find(context, job_id)
    if row is None:
        raise Problem(404, f"no job {one_line(job_id)!r}")
    return row


def find(context: ServeContext, job_id: str) -> Row | None:
    """Return the job's row, or None."""
    return next(iter(context.database.rows(select(job).where(job.c.id == job_id))), None)


def require_own(caller: Caller, row: Row) -> None:
    """Raise Problem with status 403 unless the caller has submitted the job, or is an owner of the server."""
    if not (caller.may("owner") or (caller.may("submitter") and row["owner"] == caller.name)):
        raise auth.forbidden(caller, f"job belongs to {row['owner']}")


def record_of(context: ServeContext, job_id: str) -> Record | None:
    """Return the job's record, or None before its submit begins. Raises StoreError."""
    records = context.store.records([job_id])
    if not records:
        return None
    if not isinstance(records[0], Record):
        raise StoreError(records[0].reason)
    return records[0]


def request_of(row: Row) -> tuple[JobSpec, dict[str, Any]]:
    """Return the job as its user has described it, and the whole request."""
    request: dict[str, Any] = parse_json(row["request"].encode())
    return JobSpec.from_json(request["spec"]), request


def copy_record(context: ServeContext, row: Row, record: Record) -> bool:
    """Update the row from the record; return True if its state or message has changed."""
    status = record.status
    values = {
        "nodes": record.nodes, "native_id": record.native_id, "started_at": record.started_at,
        "ended_at": record.ended_at, "warning": _text(record.warning),
    }  # fmt: skip
    return _change(context, row, status, values)


def fail(context: ServeContext, row: Row, message: str, reason: Reason = Reason.SETUP) -> None:
    """Record the end of a job that never had a record."""
    state = State.CANCELLED if reason is Reason.USER else State.FAILED
    now = time.time()
    status = Status(state=state, reason=reason, message=message, observed_at=now)
    _change(context, row, status, {"ended_at": now, "warning": ""})


def warn(context: ServeContext, row: Row, message: str) -> None:
    """Record why the job is not submitted yet."""
    _write(context, row, {"warning": _text(message)})


def cancel(context: ServeContext, caller: Caller, job_id: str) -> Row:
    """Request the end of a job; return its row. Nothing happens to a job that is over. Raises Problem, Unreachable."""
    row = get(context, job_id)
    require_own(caller, row)
    if row["state"] in FINAL:
        return row
    with context.database.write() as connection:
        if row["cancel_asked"] is None:
            connection.execute(update(job).where(job.c.id == job_id).values(cancel_asked=time.time()))
        auth.record(connection, caller, "cancel", f"job {job_id}")
    record = record_of(context, job_id)
    if record is None:
        context.submits.set()  # the submitter ends it
    else:
        cancel_record(context, row, record)
    return get(context, job_id)


def cancel_record(context: ServeContext, row: Row, record: Record) -> None:
    """Cancel a job that has a record. Raises Unreachable."""
    try:
        Job(record).request_cancel(refresh=False)
    finally:
        copy_record(context, row, record)


def delete_job(context: ServeContext, caller: Caller, job_id: str) -> None:
    """Delete a job that is over, with its logs and what its target stores of it. Raises Problem, StoreError."""
    row = get(context, job_id)
    require_own(caller, row)
    if row["state"] not in FINAL:
        raise Problem(409, f"job {job_id} is {row['state']}, not over: cancel it first")
    remove(context, caller, job_id)


def remove(context: ServeContext, caller: Caller, job_id: str) -> None:
    """Delete all of a job that is over. Raises Problem with status 409 if some of it runs, or a job waits for it."""
    if record_of(context, job_id) is not None:
        try:
            pruned = prune(context.store, ids=[job_id])
        except StoreNotWritable:
            raise
        except StoreError as error:
            raise Problem(409, str(error)) from None
        if not pruned.ids:
            raise Problem(409, "; ".join(pruned.kept_reasons) or f"job {job_id} cannot be deleted")
    delete_secrets(context, job_id)
    with context.database.write() as connection:
        connection.execute(delete(job).where(job.c.id == job_id))
        auth.record(connection, caller, "delete", f"job {job_id}")
    context.spools.remove(job_id)


def secrets_of(context: ServeContext, job_id: str) -> Path:
    """Return the directory with the values of the job's secrets, if it has any."""
    return context.home / "secrets" / job_id


def delete_secrets(context: ServeContext, job_id: str) -> None:
    """Delete the values of the job's secrets."""
    atomic_files.remove_tree(str(secrets_of(context, job_id)))


def delete_orphaned_secrets(context: ServeContext) -> None:
    """Delete values that a killed server has left, of jobs that are over or were never accepted."""
    live = {row["id"] for row in context.database.rows(select(job.c.id).where(job.c.state.not_in(FINAL)))}
    for path in (context.home / "secrets").iterdir():
        if path.name not in live and path.stat().st_mtime < time.time() - _ORPHANED_S:
            delete_secrets(context, path.name)


def describe(context: ServeContext, caller: Caller, job_id: str) -> dict[str, Any]:
    """Return everything known about a job; of the target's options and the directory only to owners."""
    row = get(context, job_id)
    spec, _ = request_of(row)
    document: dict[str, Any] = {"job": view(row).model_dump(), "spec": spec.to_json() | {"code": ""}}
    record = record_of(context, job_id)
    if record is None:
        return document | {"plan": None, "events": [], "exit": None}
    stored = Job(record).describe()
    document |= {"plan": None, "events": stored["events"], "exit": stored["exit"]}
    if caller.may("owner"):
        document |= {"plan": str(record.plan()), "directory": record.path, "options": stored["options"]}
    return document


def _change(context: ServeContext, row: Row, status: Status, values: Mapping[str, Any]) -> bool:
    texts = {"message": _text(status.message), "native_state": _text(status.native_state)}
    shown = {name: value for name, value in (status.to_json() | texts).items() if name in row}
    changed = _write(context, row, {**values, **shown})
    if status.state.final:
        delete_secrets(context, row["id"])
        context.spools.complete(row["id"])
    return bool(changed - {"observed_at"})


def _write(context: ServeContext, row: Row, values: Mapping[str, Any]) -> set[str]:
    """Write the values that differ from the row's; return their names. A row that is final stays as it is."""
    new = {name: value for name, value in values.items() if row[name] != value}
    if not new:
        return set()
    if set(new) != {"observed_at"}:
        new["changed_at"] = time.time()
    chosen = update(job).where(job.c.id == row["id"], job.c.state.not_in(FINAL))
    with context.database.write() as connection:
        connection.execute(chosen.values(**new))
    if "changed_at" in new:
        context.changes.notify(row["id"])
    return set(new)


def _text(line: str) -> str:
    """Return the text without lone surrogates, which databases refuse."""
    return one_line(line).encode(errors="backslashreplace").decode()
