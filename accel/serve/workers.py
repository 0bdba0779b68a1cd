"""The threads of a server: one submits jobs; one polls the targets of live jobs and deletes old ones."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator

from sqlalchemy import select

from schedulers.errors import SchedulerError, StoreError, UnknownTarget, Unreachable
from schedulers.job import Reason
from schedulers.jobs.handle import Job, submit_spec
from schedulers.jobs.poll import poll_all
from schedulers.store.paths import config_home
from schedulers.store.record import Record

from . import code, jobs, submits
from .auth import SERVER
from .context import ServeContext
from .jobs import FINAL, Row
from .problems import Problem
from .tables import job
from .targets import offered_targets

_JOIN_S = 0.5
_WORKERS, _PER_TARGET = 8, 4
_TICK_S = 1.0  # between two polls while a request waits for a job or follows its log
_CLEAN_S = 3600.0
_DAY_S = 86_400.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def working(context: ServeContext) -> Iterator[None]:
    """Submit and poll jobs in threads while the block runs. What they do at its end may be cut off."""
    threads = [
        threading.Thread(target=Submitter(context).run, daemon=True),
        threading.Thread(target=_run_poller, args=(context,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        context.end()
        for thread in threads:
            thread.join(_JOIN_S)


class Submitter:
    """Submits every job whose row is `submitting`, each in a thread of its own.

    The threads are daemons: a submit that a stopped server leaves behind is completed by the next one.
    """

    def __init__(self, context: ServeContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._active: dict[str, str] = {}  # id -> target
        self._tried_at: dict[str, float] = {}

    def run(self) -> None:
        """Submit jobs until the server ends. What could not be submitted is tried again every `poll_s`."""
        context = self._context
        while not context.ending.is_set():
            context.submits.clear()
            try:
                for row in self._next():
                    threading.Thread(target=self._submit, args=(row,), name="submit", daemon=True).start()
            except Exception:
                _log.exception("the jobs to submit cannot be read")
            context.submits.wait(context.settings.poll_s)

    def _next(self) -> list[Row]:
        """Return the jobs to submit now, those first that were tried least recently."""
        rows = self._context.database.rows(select(job).where(job.c.state == "submitting").order_by(job.c.id))
        chosen = []
        with self._lock:
            self._tried_at = {row["id"]: self._tried_at.get(row["id"], 0.0) for row in rows}
            count = Counter(self._active.values())
            for row in sorted(rows, key=lambda row: self._tried_at[row["id"]]):
                is_free = row["id"] not in self._active and count[row["target"]] < _PER_TARGET
                if is_free and len(self._active) < _WORKERS:
                    self._active[row["id"]] = row["target"]
                    self._tried_at[row["id"]] = time.monotonic()
                    count[row["target"]] += 1
                    chosen.append(row)
        return chosen

    def _submit(self, row: Row) -> None:
        context = self._context
        try:
            submit_row(context, row)
            is_done = jobs.get(context, row["id"])["state"] != "submitting"
            if is_done:
                context.metrics.submit_seconds.labels(row["target"]).observe(time.time() - row["created_at"])
        except Exception:  # a defect, or the database is away; the row stays as it is
            _log.exception("job %s cannot be submitted", row["id"])
            is_done = False
        with self._lock:
            del self._active[row["id"]]
        if is_done:  # its place is free for the next
            context.submits.set()


def submit_row(context: ServeContext, row: Row) -> None:
    """Submit the job of the row, or complete its submit, and update the row.

    A submit that a killed server has begun is in the store already: its lock and the target's own search for an
    earlier submit keep the job from running twice.
    """
    try:
        record = jobs.record_of(context, row["id"])
        if record is not None:
            Job(record).status()
        else:
            _begin(context, row)
    except (Unreachable, StoreError) as error:
        jobs.warn(context, row, str(error))
    except SchedulerError as error:
        if jobs.record_of(context, row["id"]) is None:
            jobs.fail(context, row, str(error))
    record = jobs.record_of(context, row["id"])
    if record is None:
        return
    if jobs.get(context, row["id"])["cancel_asked"] and not (record.cancel_requested or record.status.state.final):
        jobs.cancel_record(context, row, record)
    jobs.copy_record(context, row, record)


def _begin(context: ServeContext, row: Row) -> None:
    """Submit a job that has no record yet. Raises what `submit_spec` raises."""
    if row["cancel_asked"]:
        jobs.fail(context, row, "", Reason.USER)
        return
    spec, request = jobs.request_of(row)
    for before in spec.after:
        if jobs.record_of(context, before) is None:
            if jobs.get(context, before)["state"] in FINAL:
                jobs.fail(context, row, f"job {before} was not submitted", Reason.DEPENDENCY)
            return
    offer = offered_targets(context.settings).get(row["target"])
    if offer is None:
        raise UnknownTarget(f"the server no longer offers target {row['target']}")
    spec = submits.on_server(context, spec, request["digest"], offer)
    spec = submits.with_secret_files(spec, jobs.secrets_of(context, row["id"]))
    submit_spec(spec, row["target"], context.store, start=config_home(), job_id=row["id"])


def _run_poller(context: ServeContext) -> None:
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
            jobs.fail(context, row, "its directory on the server is gone", Reason.LOST)


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
