"""Jobs: their rows and endpoints. A row has who asked for what; what became of it is a copy of the job's record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi import Path as InPath
from pydantic import BaseModel, Field
from sqlalchemy import RowMapping, Select, delete, select, update
from starlette.concurrency import run_in_threadpool

from schedulers.convert import parse_json
from schedulers.errors import StoreError, StoreNotWritable
from schedulers.job import JobSpec, Reason, State, Status
from schedulers.jobs import handle
from schedulers.jobs.prune import prune
from schedulers.printable import one_line
from schedulers.store import atomic_files
from schedulers.store.record import Record

from . import auth
from .auth import Caller, Submitter, Viewer
from .changes import is_set_within
from .context import Context, ServeContext
from .problems import Ascii, Problem, Strict
from .tables import job

router = APIRouter(tags=["jobs"])

Row = RowMapping
JobId = Annotated[str, InPath(max_length=64)]

FINAL = tuple(state.value for state in State if state.final)

_MAX_IDS, _MAX_WAIT_S = 500, 30.0
_ORPHANED_S = 600.0  # of secrets without a job: a request may just be checked


_State = Literal["submitting", "queued", "running", "succeeded", "failed", "cancelled"]


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


class JobList(BaseModel):
    """A page of jobs, the newest first. `more`: there are older ones."""

    jobs: list[JobView]
    more: bool


class JobQuery(Strict):
    """A choice of jobs. `ids`: at most 500, with commas; `before`: only older jobs than the one of this id."""

    ids: str | None = Field(None, max_length=8000)
    state: list[_State] = Field(default_factory=list)
    target: str | None = None
    owner: str | None = None
    name: str | None = None
    since: float | None = Field(None, allow_inf_nan=False, description="only jobs that were submitted later")
    until: float | None = Field(None, allow_inf_nan=False, description="only jobs that were submitted before")
    before: str | None = Field(None, max_length=64)
    limit: int = Field(100, ge=1, le=1000)


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


def _job(caller: Viewer, job_id: JobId, context: Context) -> Row:
    return get(context, job_id)


def _own_job(caller: Submitter, row: Job) -> Row:
    if not (caller.may("owner") or row["owner"] == caller.name):
        raise auth.forbidden(caller, f"job belongs to {row['owner']}")
    return row


Job = Annotated[Row, Depends(_job)]
OwnJob = Annotated[Row, Depends(_own_job)]  # of the caller, or any for an owner of the server


@router.get("/jobs")
def list_jobs(query: Annotated[JobQuery, Query()], caller: Viewer, context: Context) -> JobList:
    """Return jobs, the newest first."""
    limit = _MAX_IDS if query.ids is not None else query.limit
    rows = context.database.rows(_chosen(query).order_by(job.c.id.desc()).limit(limit + 1))
    return JobList(jobs=[view(row) for row in rows[:limit]], more=len(rows) > limit)


@router.get("/jobs/{job_id}")
async def show_job(
    job_id: JobId,
    caller: Viewer,
    context: Context,
    wait: Annotated[float, Query(ge=0, le=_MAX_WAIT_S, description="seconds to wait for a change")] = 0.0,
) -> JobView:
    """Return one job; with `wait`, when its state or message changes, at once if it is over."""
    with context.changes.waiting(job_id) as changed:
        row = await run_in_threadpool(get, context, job_id)
        if wait and row["state"] not in FINAL and not context.ending.is_set() and await is_set_within(changed, wait):
            row = await run_in_threadpool(get, context, job_id)
    return view(row)


@router.post("/jobs/{job_id}/cancel", status_code=202)
def cancel_job(caller: Submitter, row: OwnJob, context: Context) -> JobView:
    """Request the end of a job; of one that is over, nothing happens."""
    if row["state"] in FINAL:
        return view(row)
    with context.database.write() as connection:
        if row["cancel_asked"] is None:
            connection.execute(update(job).where(job.c.id == row["id"]).values(cancel_asked=time.time()))
        auth.record(connection, caller, "cancel", f"job {row['id']}")
    record = record_of(context, row["id"])
    if record is None:
        context.submits.set()  # the submitter ends it
    else:
        cancel_record(context, row, record)
    return view(get(context, row["id"]))


@router.delete("/jobs/{job_id}", status_code=204)
def delete_job(caller: Submitter, row: OwnJob, context: Context) -> None:
    """Delete a job that is over, with its logs."""
    if row["state"] not in FINAL:
        raise Problem(409, f"job {row['id']} is {row['state']}, not over: cancel it first")
    remove(context, caller, row["id"])


@router.get("/jobs/{job_id}/describe", response_model=dict[str, Any])
def describe_job(caller: Viewer, row: Job, context: Context) -> Ascii:
    """Return everything known about a job: its request, plan and events."""
    spec, _ = request_of(row)
    document: dict[str, Any] = {"job": view(row).model_dump(), "spec": spec.to_json() | {"code": ""}}
    document |= {"plan": None, "events": [], "exit": None}
    record = record_of(context, row["id"])
    if record is not None:
        stored = handle.Job(record).describe()
        document |= {"events": stored["events"], "exit": stored["exit"]}
        if caller.may("owner"):
            document |= {"plan": str(record.plan()), "directory": record.path, "options": stored["options"]}
    return Ascii(document)


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


def copy_record(context: ServeContext, row: Row, record: Record) -> None:
    """Update the row from the record."""
    copied = {name: getattr(record, name) for name in ("nodes", "native_id", "started_at", "ended_at", "warning")}
    _change(context, row, record.status, copied)


def fail(context: ServeContext, row: Row, message: str, reason: Reason = Reason.SETUP) -> None:
    """Record the end of a job that never had a record."""
    state = State.CANCELLED if reason is Reason.USER else State.FAILED
    now = time.time()
    status = Status(state=state, reason=reason, message=message, observed_at=now)
    _change(context, row, status, {"ended_at": now, "warning": ""})


def warn(context: ServeContext, row: Row, message: str) -> None:
    """Record why the job is not submitted yet."""
    _write(context, row, {"warning": message})


def cancel_record(context: ServeContext, row: Row, record: Record) -> None:
    """Cancel a job that has a record. Raises Unreachable."""
    try:
        handle.Job(record).request_cancel(refresh=False)
    finally:
        copy_record(context, row, record)


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
            raise Problem(409, "; ".join(pruned.kept_reasons))
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


def _chosen(query: JobQuery) -> Select[Any]:
    chosen = select(job)
    if query.ids is not None:
        ids = [job_id for job_id in query.ids.split(",") if job_id]
        if len(ids) > _MAX_IDS:
            raise Problem(422, f"ids: {len(ids)} ids; at most {_MAX_IDS} are allowed", "query.ids")
        chosen = chosen.where(job.c.id.in_(ids))
    if query.state:
        chosen = chosen.where(job.c.state.in_(query.state))
    for name in ("target", "owner", "name"):
        if (value := getattr(query, name)) is not None:
            chosen = chosen.where(job.c[name] == value)
    if query.since is not None:
        chosen = chosen.where(job.c.created_at >= query.since)
    if query.until is not None:
        chosen = chosen.where(job.c.created_at < query.until)
    return chosen if query.before is None else chosen.where(job.c.id < query.before)


def _change(context: ServeContext, row: Row, status: Status, values: Mapping[str, Any]) -> None:
    _write(context, row, {**values, **{name: value for name, value in status.to_json().items() if name in row}})
    if status.state.final:
        delete_secrets(context, row["id"])
        context.spools.complete(row["id"])


def _write(context: ServeContext, row: Row, values: Mapping[str, Any]) -> None:
    """Write the values that differ from the row's. A row that is final stays as it is."""
    # Databases refuse lone surrogates in text.
    texts = {
        name: one_line(value).encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in values.items()
    }
    new = {name: value for name, value in texts.items() if row[name] != value}
    is_news = bool(new.keys() - {"observed_at"})
    if is_news:
        new["changed_at"] = time.time()
    if new:
        chosen = update(job).where(job.c.id == row["id"], job.c.state.not_in(FINAL))
        with context.database.write() as connection:
            connection.execute(chosen.values(**new))
    if is_news:
        context.changes.notify(row["id"])
