"""Poll the targets of all live jobs, update their rows, delete old jobs."""

from __future__ import annotations

import logging
import time

from sqlalchemy import select

from schedulers.errors import SchedulerError
from schedulers.job import Reason
from schedulers.jobs.poll import poll_all
from schedulers.store.record import Record

from . import code, jobs
from .auth import SERVER
from .context import ServeContext
from .jobs import FINAL
from .problems import Problem
from .tables import job

_TICK_S = 1.0  # between two polls while a request waits for a job or follows its log
_CLEAN_S = 3600.0
_DAY_S = 86_400.0
_MISSING = "its directory on the server is gone"

_log = logging.getLogger(__name__)


def run(context: ServeContext) -> None:
    """Poll every `poll_s` seconds, or each second while a request waits for a job or its log, until the server ends."""
    complete_logs(context)
    polled_at = cleaned_at = float("-inf")
    while not context.ending.wait(_TICK_S):
        now = time.monotonic()
        is_awaited = context.changes.awaited or context.spools.changes.awaited
        try:
            if is_awaited or now - polled_at >= context.settings.poll_s:
                polled_at = now
                poll(context)
            if now - cleaned_at >= _CLEAN_S:
                cleaned_at = now
                clean(context)
        except Exception:  # the database, or a defect in a target: the next round may succeed
            _log.exception("the jobs cannot be polled")


def poll(context: ServeContext) -> None:
    """Poll each target once for all its live jobs; copy what has changed to their rows."""
    rows = {row["id"]: row for row in context.database.rows(select(job).where(job.c.state.not_in(FINAL)))}
    records = {record.id: record for record in context.store.records(rows)}
    live = [r for r in records.values() if isinstance(r, Record) and not r.status.state.final]
    poll_all(live)
    for job_id, row in rows.items():
        record = records.get(job_id)
        if isinstance(record, Record):
            # With the row: the local supervisor writes to the record itself.
            jobs.copy_record(context, row, record)
        elif record is not None:
            jobs.warn(context, row, record.reason)
        elif row["state"] != "submitting":
            jobs.fail(context, row, _MISSING, Reason.LOST)


def complete_logs(context: ServeContext) -> None:
    """Read the logs of jobs that ended within the last day to their ends, which a server may not have done."""
    for row in context.database.rows(select(job.c.id).where(job.c.ended_at > time.time() - _DAY_S)):
        context.spools.complete(row["id"])


def clean(context: ServeContext) -> None:
    """Delete jobs that ended more than `keep` days ago, and code that no job and no recent upload needs."""
    code.delete_abandoned(context)
    jobs.delete_orphaned_secrets(context)
    keep = context.settings.keep
    if keep is not None:
        for row in context.database.rows(select(job).where(job.c.ended_at < time.time() - keep * _DAY_S)):
            try:
                jobs.remove(context, SERVER, row["id"])
            except (Problem, SchedulerError) as error:
                _log.warning("job %s is kept: %s", row["id"], error)
    code.delete_unused(context)
