"""Endpoints for jobs."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field
from sqlalchemy import Select, select
from starlette.concurrency import run_in_threadpool

from .. import jobs, submits
from ..auth import Submitter, Viewer
from ..jobs import FINAL, JobView
from ..problems import Ascii, Problem
from ..submits import JobRequest
from ..tables import job
from .people import Context, Strict

router = APIRouter(tags=["jobs"])

_MAX_IDS, _MAX_WAIT_S = 500, 30.0

# The ids that clients make: eight characters of time, three random ones.
NewId = Annotated[str, Path(pattern="^[0-9a-hjkmnp-tv-z]{11}$", description="an id that the client has made")]
JobId = Annotated[str, Path(max_length=64)]
State = Literal["submitting", "queued", "running", "succeeded", "failed", "cancelled"]


class Submitted(JobView):
    """A job that was accepted. `warnings`: of its plan."""

    warnings: list[str]


class DryRun(BaseModel):
    """The plan of a submit. `refusals`: why the request would be refused; then there is no plan."""

    plan: str | None
    warnings: list[str]
    refusals: list[str]


class JobList(BaseModel):
    """A page of jobs, the newest first. `more`: there are older ones."""

    jobs: list[JobView]
    more: bool


class JobQuery(Strict):
    """A choice of jobs. `ids`: at most 500, with commas; `before`: only older jobs than the one of this id."""

    ids: str | None = Field(None, max_length=8000)
    state: list[State] = Field(default_factory=list)
    target: str | None = None
    owner: str | None = None
    name: str | None = None
    since: float | None = Field(None, allow_inf_nan=False, description="only jobs that were submitted later")
    until: float | None = Field(None, allow_inf_nan=False, description="only jobs that were submitted before")
    before: str | None = Field(None, max_length=64)
    limit: int = Field(100, ge=1, le=1000)


@router.get("/jobs")
def list_jobs(query: Annotated[JobQuery, Query()], caller: Viewer, context: Context) -> JobList:
    """Return jobs, the newest first."""
    limit = _MAX_IDS if query.ids is not None else query.limit
    rows = context.database.rows(_chosen(query).order_by(job.c.id.desc()).limit(limit + 1))
    return JobList(jobs=[jobs.view(row) for row in rows[:limit]], more=len(rows) > limit)


@router.get("/jobs/{job_id}")
async def show_job(
    job_id: JobId,
    caller: Viewer,
    context: Context,
    wait: Annotated[float, Query(ge=0, le=_MAX_WAIT_S, description="seconds to wait for a change")] = 0.0,
) -> JobView:
    """Return one job; with `wait`, when its state or message changes, at once if it is over."""
    with context.changes.waiting(job_id) as changed:
        row = await run_in_threadpool(jobs.get, context, job_id)
        if not wait or row["state"] in FINAL or context.ending.is_set():
            return jobs.view(row)
        try:
            await asyncio.wait_for(changed.wait(), wait)
        except (TimeoutError, asyncio.TimeoutError):
            return jobs.view(row)
    return jobs.view(await run_in_threadpool(jobs.get, context, job_id))


@router.put(
    "/jobs/{job_id}",
    status_code=201,
    response_model=Submitted | DryRun,
    responses={200: {"model": Submitted | DryRun, "description": "A dry run, or the same request again"}},
)
def put_job(
    job_id: NewId, body: JobRequest, caller: Submitter, context: Context, response: Response, dry_run: bool = False
) -> Submitted | DryRun:
    """Submit a job under an id that the client has made; the same request again changes nothing."""
    if dry_run:
        response.status_code = 200
        return DryRun(**submits.dry_run(context, caller, job_id, body))
    row, warnings, is_new = submits.submit(context, caller, job_id, body)
    response.status_code = 201 if is_new else 200
    return Submitted(**jobs.view(row).model_dump(), warnings=list(warnings))


@router.delete("/jobs/{job_id}", status_code=204)
def delete_job(job_id: JobId, caller: Submitter, context: Context) -> None:
    """Delete a job that is over, with its logs."""
    jobs.delete_job(context, caller, job_id)


@router.post("/jobs/{job_id}/cancel", status_code=202)
def cancel_job(job_id: JobId, caller: Submitter, context: Context) -> JobView:
    """Request the end of a job; of one that is over, nothing happens."""
    return jobs.view(jobs.cancel(context, caller, job_id))


@router.get("/jobs/{job_id}/describe", response_model=dict[str, Any])
def describe_job(job_id: JobId, caller: Viewer, context: Context) -> Ascii:
    """Return everything known about a job: its request, plan and events."""
    return Ascii(jobs.describe(context, caller, job_id))


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
