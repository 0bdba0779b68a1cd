"""The TPU target: an existing slice, or one that is created for each job and deleted after it.

Each poll of a job with a slice of its own performs the slice's next step. `slice.json` in the job's directory stores
the progress, and a lock admits one client at a time. A slice's name derives from the job's id and the attempt, so that
the next client continues the work of one that was killed. The slice deletes itself if no client does
(schedulers/node/tpu_slice.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import SchedulerError, SpecError, UnknownJob, Unreachable
from ..hosts.remote_files import host_program
from ..job import Cursor, JobSpec, LogLine, Reason, State, Status
from ..store import atomic_files
from ..store.record import Record, read_record
from ..target import CheckReport, DiscoveredJob, JobSummary, Plan, TargetContext, require_answers
from . import api, slices
from . import options as tpu_options
from .api import node_id, result_url
from .slice_target import CODE, SliceTarget
from .topology import hosts_of

_RETRY_PAUSES_S = (5.0, 300.0)  # after a stockout: first, last
_MAX_MOVES = 10
_STALE_STATUS_S = 60.0  # for which the API may still report a preempted slice as READY
_OF_LOST_HOSTS = (Reason.NODE_FAILURE, Reason.NO_CAPACITY)
_OF_PREEMPTION = (*_OF_LOST_HOSTS, Reason.SETUP)
_MAX_WORKERS = 16
_CANCELLED = Status(state=State.CANCELLED, reason=Reason.USER)
_LOCK = "slice.lock"
_LOGS = "slice.log"  # the lines that the hosts had when the job ended


@dataclass(kw_only=True)
class _Slice:
    """The progress of a job's slice.

    record:    the job's, in the store; not in the file.
    project:   where the slice is.
    began:     when it was first requested.
    attempt:   of the job, when the slice was requested.
    operation: the operation that creates it, if known.
    again_at:  when it is requested again after a stockout.
    ready_at:  when a client first saw it READY; 0 before.
    left:      the number of slices that the ranks have left after a warning.
    end:       how the job ended; the slice is then to be deleted.
    """

    record: Record
    project: str
    began: float
    attempt: int = 0
    operation: str = ""
    again_at: float = 0.0
    ready_at: float = 0.0
    left: int = 0
    end: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        return node_id(self.record.id, self.attempt)

    def status(self, state: State, message: str, reason: Reason = Reason.NONE) -> Status:
        return Status(state=state, reason=reason, attempt=self.attempt, message=message)


@dataclass(frozen=True)
class JobPlacement:
    """A job on its current hosts: the target that runs it there, and its native id there.

    prefix: begins the names of its log sources, to distinguish these hosts from earlier ones.
    """

    target: SliceTarget
    native_id: str
    prefix: str

    def lines(self, since: Cursor) -> Iterator[LogLine]:
        for line in self.target.logs(self.native_id, since.below(self.prefix)):
            yield replace(line, source=self.prefix + line.source)


class CreatedSlices(SliceTarget):
    """A target that creates a slice for each job. A job's native id is `accel-JOB/JOB` in every attempt.

    A job gets its hosts after the submit and may move: its logs distinguish the hosts, and outlive them.
    """

    def __init__(self, context: TargetContext) -> None:
        super().__init__(context)
        self._targets: dict[str, SliceTarget] = {}
        self._apis: dict[str, api.Api] = {}

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the plan of `HostsTarget.plan`, with the slice that is created."""
        plan, options, name = super().plan(spec, job_id), self._options, node_id(job_id, 0)
        file, resource_type = ("queued-resource.json", "queued resource") if options.queued else ("node.json", "TPU VM")
        script = "{schedulers/node/tpu_slice.py}"
        request = api.request_body(options, job_id, 0, project=options.project or "{project}", script=script)
        last = ("keep" if options.keep else "delete", name, "after the job")
        first = (("create", resource_type, name, "in", str(options.zone)), ("wait", "until it is READY"))
        files = {file: json.dumps(request, indent=2) + "\n", **plan.files}
        return replace(plan, files=files, actions=(*first, *plan.actions, last))

    def submit_many(self, plans: Sequence[Plan]) -> list[str | SchedulerError]:
        """Request the slices. Polls continue from there. Idempotent."""
        return [self._submitted(plan) for plan in plans]

    def _submitted(self, plan: Plan) -> str | SchedulerError:
        job_id = plan.job_id
        try:
            with atomic_files.exclusive_lock(self._file(job_id, _LOCK)):
                state = self._read(job_id)
                if state is None:
                    with contextlib.suppress(FileExistsError):  # the job runs the code of this moment
                        os.link(self._snapshot_path(plan), self._file(job_id, CODE))
                    record = read_record(job_id, self._file(job_id))
                    state = _Slice(record=record, project=self._api.project, began=time.time())
                    self._write(state)
                if not state.ready_at and state.end is None:
                    self._create(state)
        except SchedulerError as error:
            return error
        return _native_id(job_id)

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return each slice's project and zone. Raises ConfigError, StoreError."""
        return {job: f"project={self._api_of(self._read(job)).project}/{self._options.zone}" for job in jobs}

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Perform each job's next step; return the statuses. Raises Unreachable, with the answers so far.

        Of jobs of other machines, only the slices are looked at.
        """
        with ThreadPoolExecutor(max_workers=_MAX_WORKERS, thread_name_prefix="slices") as pool:
            outcomes = dict(zip(native_ids, pool.map(self._polled, native_ids), strict=True))
        elsewhere = [native_id for native_id, outcome in outcomes.items() if outcome is None]
        try:
            newest = {created.job_id: created for created in (self._api.created_slices() if elsewhere else [])}
            outcomes |= {native_id: _status_of(newest.get(_job(native_id))) for native_id in elsewhere}
        except SchedulerError as error:
            outcomes |= dict.fromkeys(elsewhere, error)
        unreachable = {key: str(outcome) for key, outcome in outcomes.items() if isinstance(outcome, SchedulerError)}
        statuses = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Status)}
        return require_answers(statuses, unreachable)

    def _polled(self, native_id: str) -> Status | SchedulerError | None:
        """Return a job's status, or the error of its poll; None for a job of another machine."""
        try:
            job_id = _job(native_id)
            if not (self._jobs / job_id).is_dir():
                return None
            with atomic_files.exclusive_lock(self._file(job_id, _LOCK), blocking=False) as acquired:
                state = self._read(job_id)
                if state is None:
                    return None
                return self._step(state) if acquired else state.record.status  # that of the client that has the lock
        except SchedulerError as error:
            return error

    # The steps of a poll, with the lock held.

    def _step(self, state: _Slice) -> Status:
        if state.end is not None:
            return self._delete(state)
        stage, message = self._stage(state)
        placement, cancelled = self._placement(state), state.record.cancel_requested
        if cancelled and (placement is None or stage in ("gone", "preempted")):
            return self._end(state, _CANCELLED)
        if stage == "preempted":
            return self._next(state)
        if stage == "failed":
            reason = Reason.NODE_FAILURE if state.ready_at else Reason.NO_CAPACITY
            return self._end(state, state.status(State.FAILED, message, reason))
        if stage == "gone" and placement is not None:
            return self._result_in_bucket(state, message)
        if stage == "gone" or (stage == "waits" and placement is None):
            return self._await(state, stage, message)
        return self._run(state, placement)

    def _run(self, state: _Slice, placement: JobPlacement | None) -> Status:
        """Return the job's status on a slice that is, or was, READY. Start the job if it is not there."""
        if not state.ready_at:
            state.ready_at = time.time()
            self._write(state)
        status = None if placement is None else placement.target.poll([placement.native_id]).get(placement.native_id)
        if placement is None or status is None:
            return self._end(state, _CANCELLED) if state.record.cancel_requested else self._start(state)
        if not status.state.final:
            if state.record.cancel_requested:
                placement.target.cancel(placement.native_id)
            return status
        if (pending := self._unless_preempted(state, status)) is not None:
            return pending
        with open(self._file(state.record.id, _LOGS), "wb") as file, contextlib.suppress(Unreachable):
            for line in placement.lines(Cursor()):
                file.write(json.dumps(dataclasses.asdict(line)).encode() + b"\n")
        return self._end(state, status)

    def _unless_preempted(self, state: _Slice, failed: Status) -> Status | None:
        """Return None if a failure is the job's end, or the job's status if its slice was preempted, or may have been.

        The hosts of a preempted slice fail before the API reports it: until then the job runs.
        """
        if not (self._options.spot and failed.reason in _OF_PREEMPTION):
            return None
        stage, _ = self._stage(state)
        if stage == "preempted":
            return self._next(state)
        recent = time.time() - failed.observed_at < _STALE_STATUS_S
        if stage != "ready" or failed.reason not in _OF_LOST_HOSTS or not recent:
            return None
        return replace(failed, state=State.RUNNING, message=f"{failed.message}; was it preempted?")

    def _result_in_bucket(self, state: _Slice, message: str) -> Status:
        """Return the job's end from the bucket, after the slice has deleted itself."""
        url = result_url(self._options, state.name, state.record.id)
        result = self._api.read(url) if url else None
        if result is None:
            message += " before the job's result was read; checkpoint_uri stores the result, keep: true keeps the slice"
            return self._end(state, state.status(State.FAILED, message, Reason.LOST))
        return self._end(state, Status.of_result(result, " in the bucket"))

    def _start(self, state: _Slice) -> Status:
        target, reached = self._target(state), False
        try:
            target.wait_reachable()
            reached = True
            plan = state.record.plan()
            settings = json.loads(plan.files["settings.json"]) | {"attempt": state.attempt}
            target.submit(replace(plan, files={"settings.json": json.dumps(settings)}))
            return state.status(State.QUEUED, f"starting on {state.name}")
        except SchedulerError as error:
            # A slice may be READY before its servers are.
            early = not reached and time.time() - state.ready_at < self._options.start_timeout_s
            if early or isinstance(error, Unreachable):
                return state.status(State.QUEUED, str(error))
            failed = state.status(State.FAILED, str(error), getattr(error, "reason", Reason.SETUP))
            return self._unless_preempted(state, failed) or self._end(state, failed)

    def _await(self, state: _Slice, stage: str, message: str) -> Status:
        """Return the status of a job whose slice is not READY. Request a missing one, unless there can be none."""
        if stage == "waits" and (state.ready_at or self._options.queued):  # a queued resource expires by itself
            return state.status(State.QUEUED, message)
        now, limit, slice_api = time.time(), self._options.valid_until_duration, self._api_of(state)
        try:
            if state.operation:
                slice_api.check_creation(state.operation)
            if now >= state.began + tpu_options.seconds(limit):
                failed = state.status(State.FAILED, f"no capacity for {state.name} within {limit}", Reason.NO_CAPACITY)
                return self._end(state, failed)
            if stage == "gone" and now >= state.again_at:
                self._create(state)
        except api.Retryable as failure:
            if stage == "waits":  # the failed creation has left it
                slice_api.delete(state.name, queued=self._options.queued)
            pause = min(max(now - state.began, _RETRY_PAUSES_S[0]), _RETRY_PAUSES_S[1])
            state.operation, state.again_at = "", now + pause
            self._write(state)
            return state.status(State.QUEUED, str(failure), failure.reason)
        except api.TpuApiError as refusal:
            return self._end(state, state.status(State.FAILED, str(refusal), refusal.reason))
        message = message if stage == "waits" else f"{state.name} is requested"
        return state.status(State.QUEUED, message, Reason.NO_CAPACITY if state.again_at else Reason.NONE)

    def _next(self, state: _Slice) -> Status:
        """Request the next slice in place of a preempted one, which `_create` deletes."""
        Path(self._placement_path(state.record.id)).unlink(missing_ok=True)
        attempt = max(state.attempt, state.record.status.attempt) + 1
        following = replace(state, attempt=attempt, began=time.time(), operation="", again_at=0.0, ready_at=0.0)
        self._write(following)
        status = self._step(following)
        if status.state.final:
            return status
        return replace(status, reason=Reason.PREEMPTED, message=f"{state.name} was preempted; {status.message}")

    def _end(self, state: _Slice, status: Status) -> Status:
        """End the job; but ranks that were warned and left a checkpoint get the next slice, at most 10 times."""
        if status.reason is Reason.PREEMPTED:
            if state.left < _MAX_MOVES:
                state.left += 1
                return self._next(state)
            status = replace(status, message=f"the ranks have left {state.left + 1} slices after preemption warnings")
        state.end = status.to_json()
        self._write(state)
        return self._delete(state)

    def _delete(self, state: _Slice) -> Status:
        """Delete the job's slices, unless the last is kept. Return the job's end. Raises Unreachable to try again."""
        status, keep_last = Status.from_json(state.end), self._options.keep and bool(state.ready_at)
        notes = [status.message]
        try:
            self._delete_attempts(state, state.attempt + (not keep_last))
        except api.TpuApiError as error:
            notes.append(str(error))
        if keep_last:
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(state.ready_at))
            notes.append(f"slice {state.name} is up since {since} (keep: accel prune deletes it)")
        return replace(status, message="; ".join(filter(None, notes)))

    def _delete_attempts(self, state: _Slice, end: int) -> None:
        """Delete the slices of the attempts before `end`; not all attempts have one."""
        for attempt in reversed(range(end)):
            self._api_of(state).delete(node_id(state.record.id, attempt), queued=self._options.queued)

    def _create(self, state: _Slice) -> None:
        self._delete_attempts(state, state.attempt)
        project, script = state.project, host_program("tpu_slice").decode()
        request = api.request_body(self._options, state.record.id, state.attempt, project=project, script=script)
        state.operation = self._api_of(state).create(state.name, request, queued=self._options.queued)
        self._write(state)

    # Other operations of the target.

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the hosts' lines or, if the hosts are gone, the archived ones."""
        start, placement = since or Cursor(), self._placement(self._read(_job(native_id)))
        if placement is not None:
            yield from placement.lines(start)
        elif os.path.exists(path := self._file(_job(native_id), _LOGS)):
            with open(path, "rb") as file:
                lines = (LogLine(**json.loads(line)) for line in file)
                yield from (line for line in lines if int(line.position) > int(start.position(line.source) or 0))

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        placement = self._placement(self._read(_job(native_id)))
        if placement is None:
            return Cursor()
        return placement.target.cursor_at(placement.native_id, when).under(placement.prefix)

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        placement = self._placement(self._read(_job(native_id)))
        if placement is None:
            return None
        cursor = placement.target.tail_at(placement.native_id, since.below(placement.prefix), count)
        return None if cursor is None else cursor.under(placement.prefix)

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """As `HostsTarget.wait`; None if the job has no hosts."""
        placement = self._placement(self._read(_job(native_id)))
        return None if placement is None else placement.target.wait(placement.native_id, timeout_s)

    def cancel(self, native_id: str) -> None:
        """Cancel a running job gracefully. Delete the slice if no job runs there or its hosts are unreachable."""
        state = self._read(_job(native_id))
        placement = self._placement(state)
        if placement is not None:
            with contextlib.suppress(Unreachable):
                placement.target.cancel(placement.native_id)
                return
        if state is not None and state.end is None:
            self._api_of(state).delete(state.name, queued=self._options.queued)

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Find a job that this machine submits or has submitted. The next poll requests a slice that does not exist."""
        state = self._read(job_id)
        if state is None:
            name = node_id(job_id, 0)
            raise UnknownJob(f"no job {job_id} here; to find it by its slice, use a tpu target with name: {name}")
        return DiscoveredJob(native_id=_native_id(job_id), spec=state.record.spec(), plan=state.record.plan())

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        """Return the slices of those jobs whose end no client has seen. Lists the slices of each project once."""
        return {
            created.job_id: f"it has slice {created.name}"
            for _, created in self._slices_of(jobs)
            if (state := self._read(created.job_id)) is None or state.end is None
        }

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Delete the jobs' slices, also those with `keep`."""
        lines = []
        for slice_api, created in self._slices_of(jobs):
            try:
                slice_api.delete(created.name, queued=created.is_queued)
            except (api.TpuApiError, Unreachable) as error:
                lines.append(f"slice {created.name} stays: {error}")
        return lines

    def _slices_of(self, jobs: Mapping[str, str | None]) -> list[tuple[api.Api, api.CreatedSlice]]:
        """Return the slices of these jobs, each with a client for its project."""
        apis = {slice_api.parent: slice_api for slice_api in (self._api_of(self._read(job_id)) for job_id in jobs)}
        slices = [(slice_api, created) for slice_api in apis.values() for created in slice_api.created_slices()]
        return [(slice_api, created) for slice_api, created in slices if created.job_id in jobs]

    def listed(self) -> list[JobSummary]:
        """List the jobs of the zone's slices that accel created, from any machine."""
        newest = {created.job_id: created for created in self._api.created_slices()}
        return [
            JobSummary(
                job_id=job_id, native_id=_native_id(job_id), name=created.name, created_at=created.created_at,
                nodes=hosts_of(created.accelerator_type or None, None, None) or 1,
            )
            for job_id, created in newest.items()
        ]  # fmt: skip

    def check(self, gpus: int = 0) -> CheckReport:
        """List the zone's slices that accel created, and their queued resources. Warn of those with an unknown job."""
        existing = self._api.created_slices()
        unknown = [created for created in existing if self._read(created.job_id) is None]
        table = [[created.name, created.state, created.accelerator_type, created.job_id] for created in existing]
        warnings = tuple(f"{created.name}: job {created.job_id} is not known here" for created in unknown)
        return CheckReport(table=[["slice", "state", "type", "job"], *table], failures=(), warnings=warnings)

    def close(self) -> None:
        for target in self._targets.values():
            target.close()

    # Helpers.

    def _api_of(self, state: _Slice | None) -> api.Api:
        """Return a client for the project of the slice, which may not be the one that the environment selects now."""
        project = self._api.project if state is None else state.project
        return self._apis.setdefault(project, api.Api(replace(self._options, project=project), self.name))

    def _stage(self, state: _Slice) -> tuple[str, str]:
        name, slice_api = state.name, self._api_of(state)
        queued = slice_api.get(name, queued=True) if self._options.queued else None
        return slices.stage(name, slice_api.get(name), queued)

    def _target(self, state: _Slice) -> SliceTarget:
        if state.name not in self._targets:
            options = replace(self._options, name=state.name, project=state.project)
            self._targets[state.name] = SliceTarget(TargetContext(name=self.name, options=options, jobs=self._jobs))
        return self._targets[state.name]

    def _placement(self, state: _Slice | None) -> JobPlacement | None:
        """Return where the job is on the slice's hosts; None before it is sent there, and after its end."""
        native = None if state is None or state.end is not None else self._placed_native_id(state.record.id)
        if state is None or native is None:
            return None
        return JobPlacement(self._target(state), native, f"{state.attempt}.")

    def _read(self, job_id: str) -> _Slice | None:
        document = atomic_files.read_document(self._file(job_id, "slice.json"))
        if document is None:
            return None
        fields = {key: value for key, value in document.items() if key in _Slice.__dataclass_fields__}
        return _Slice(**fields, record=read_record(job_id, self._file(job_id)))

    def _write(self, state: _Slice) -> None:
        document = {key: value for key, value in vars(state).items() if key != "record"}
        atomic_files.write_document(self._file(state.record.id, "slice.json"), document)

    def _file(self, job_id: str, name: str = "") -> str:
        return str(self._jobs / job_id / name)


class TpuTarget(SliceTarget):
    """A target on an existing slice. For options that describe a slice to create, this makes a CreatedSlices."""

    def __new__(cls, context: TargetContext) -> SliceTarget:  # type: ignore[misc]
        tpu_options.check(context.options, context.name)
        return CreatedSlices(context) if tpu_options.creates(context.options) else super().__new__(cls)

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Poll the hosts. Jobs whose hosts do not respond have the slice's own state."""
        try:
            return super().poll(native_ids)
        except Unreachable as error:
            status = self._status_if_over()
            if status is None:
                raise
            return {**dict.fromkeys(native_ids, status), **error.answers}

    def cancel(self, native_id: str) -> None:
        """Cancel the job. Do nothing if the slice is gone."""
        try:
            super().cancel(native_id)
        except Unreachable:
            if self._status_if_over() is None:
                raise

    def running(self, jobs: Mapping[str, str | None]) -> Mapping[str, str | SchedulerError]:
        """Return where jobs run; nothing if the slice is gone."""
        running = super().running(jobs)
        return {} if running and self._status_if_over() is not None else running

    def clear(self, jobs: Mapping[str, str | None]) -> list[str]:
        """Remove the jobs' directories. Report nothing if the slice is gone."""
        lines = super().clear(jobs)
        return [] if lines and self._status_if_over() is not None else lines

    def _status_if_over(self) -> Status | None:
        """Return how jobs on unreachable hosts have ended, or None if that is unknown."""
        try:
            return slices.status_if_over(self._slice(), self._options)
        except SchedulerError:
            return None


def _status_of(created: api.CreatedSlice | None) -> Status | None:
    """Return what a slice alone shows of its job."""
    if created is None:
        return None
    stage, message = slices.stage(created.name, created.node, created.queued)
    state = State.RUNNING if stage == "ready" else State.QUEUED
    return Status(state=state, native_state=created.state, message=message)


def _native_id(job_id: str) -> str:
    return f"accel-{job_id}/{job_id}"


def _job(native_id: str) -> str:
    job_id = native_id.rpartition("/")[2]
    if native_id != _native_id(job_id):
        raise SpecError(f"{native_id!r} is not the id of a job with a slice of its own (accel-JOB/JOB)")
    return job_id
