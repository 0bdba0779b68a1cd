"""The submitter: carries out the submits that the database has, a few at a time, and again after a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter

from sqlalchemy import select

from schedulers.errors import SchedulerError, StoreError, UnknownTarget, Unreachable
from schedulers.job import Reason
from schedulers.jobs.handle import Job, submit_spec
from schedulers.store.paths import config_home

from . import jobs, submits
from .context import ServeContext
from .jobs import Row
from .tables import job
from .targets import offered_targets

_WORKERS, _PER_TARGET = 8, 4

_log = logging.getLogger(__name__)


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
            if jobs.get(context, before)["state"] in jobs.FINAL:
                jobs.fail(context, row, f"job {before} was not submitted", Reason.DEPENDENCY)
            return
    offer = offered_targets(context.settings).get(row["target"])
    if offer is None:
        raise UnknownTarget(f"the server no longer offers target {row['target']}")
    spec = submits.on_server(context, spec, request["digest"], offer)
    spec = submits.with_secret_files(spec, jobs.secrets_of(context, row["id"]))
    submit_spec(spec, row["target"], context.store, start=config_home(), job_id=row["id"])
