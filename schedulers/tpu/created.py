"""Slices that are created for each job of a TPU target, and deleted after it.

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

from ..errors import SchedulerError, SpecError, StoreError, UnknownJob, Unreachable
from ..hosts.remote_files import host_program
from ..job import Cursor, JobSpec, LogLine, Reason, State, Status
from ..store import atomic_files
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


@dataclass(kw_only=True)
class _Slice:
    """The progress of a job's slice.

    job_id:    not in the file.
    attempt:   of the job, when the slice was requested.
    latest:    the newest attempt seen on it.
    began:     when it was first requested.
    operation: the operation that creates it, if known.
    again_at:  when it is requested again after a stockout.
    ready_at:  when a client first saw it READY; 0 before.
    preempted: it must be deleted, and the next one requested.
    failed_at: when its hosts first failed, perhaps because it was preempted; 0 before.
    left:      the number of slices that the ranks have left after a warning.
    end:       how the job ended; the slice is then to be deleted.
    project:   where it is; "" in files of earlier versions.
    """

    job_id: str
    attempt: int = 0
    latest: int = 0
    began: float = 0.0
    operation: str = ""
    again_at: float = 0.0
    ready_at: float = 0.0
    preempted: bool = False
    failed_at: float = 0.0
    left: int = 0
    end: dict[str, Any] | None = None
    project: str = ""

    @property
    def name(self) -> str:
        return node_id(self.job_id, self.attempt)


@dataclass(frozen=True)
class JobPlacement:
    """A job on its current hosts: the target that runs it there, and its native id there.

    prefix: begins the names of its log sources, to distinguish these hosts from earlier ones.
    """

    target: SliceTarget
    native_id: str
    prefix: str

    def poll(self) -> Status | None:
        return self.target.poll([self.native_id]).get(self.native_id)

    def lines(self, since: Cursor) -> Iterator[LogLine]:
        for line in self.target.logs(self.native_id, since.below(self.prefix)):
            yield replace(line, source=self.prefix + line.source)


class CreatedSlices(SliceTarget):
    """A target that creates a slice for each job. A job's native id is `accel-JOB/JOB` in every attempt.

    A job gets its hosts after the submit and may move: its logs distinguish the hosts, and outlive them.
    """

    def __init__(self, context: TargetContext) -> None:
        super().__init__(context)
        self._context = context
        self._targets: dict[str, SliceTarget] = {}
        self._apis: dict[str, api.Api] = {}

    def plan(self, spec: JobSpec, job_id: str) -> Plan:
        """Return the plan of `HostsTarget.plan`, with the slice that is created."""
        plan, options, name = super().plan(spec, job_id), self._options, node_id(job_id, 0)
        file, resource_type = ("queued-resource.json", "queued resource") if options.queued else ("node.json", "TPU VM")
        request = self._body(job_id, 0, options.project or "{project}", "{schedulers/node/tpu_slice.py}")
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
            with self._slice_lock(job_id, blocking=True):
                state = self._read(job_id)
                if state is None:
                    with contextlib.suppress(FileExistsError):  # the job runs the code of this moment
                        os.link(self._snapshot_path(plan), self._file(job_id, CODE))
                    state = _Slice(job_id=job_id, began=time.time(), project=self._api.project)
                    self._write(state)
                if not state.ready_at and state.end is None:
                    self._create(state)
        except SchedulerError as error:
            return error
        return f"accel-{job_id}/{job_id}"

    def backends(self, jobs: Mapping[str, str | None]) -> Mapping[str, str]:
        """Return each slice's project and zone. Raises ConfigError, StoreError."""
        projects = {job_id: self._api_of(self._read(job_id)).project for job_id in jobs}
        return {job_id: f"project={project}/{self._options.zone}" for job_id, project in projects.items()}

    def poll(self, native_ids: Sequence[str]) -> Mapping[str, Status]:
        """Perform each job's next step; return the statuses. Raises Unreachable, with the answers so far.

        Of jobs of other machines, only the slices are looked at.
        """
        here = [native_id for native_id in native_ids if Path(self._jobs, native_id.rpartition("/")[2]).is_dir()]
        with ThreadPoolExecutor(max_workers=_MAX_WORKERS, thread_name_prefix="slices") as pool:
            outcomes = dict(zip(here, pool.map(self._polled, here), strict=True))
        if elsewhere := [native_id for native_id in native_ids if native_id not in outcomes]:
            outcomes |= self._polled_elsewhere(elsewhere)
        unreachable = {key: str(outcome) for key, outcome in outcomes.items() if isinstance(outcome, SchedulerError)}
        statuses = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, Status)}
        return require_answers(statuses, unreachable)

    def _polled_elsewhere(self, native_ids: Sequence[str]) -> dict[str, Status | SchedulerError | None]:
        """Return the statuses of jobs of other machines by their slices; None for a job without one."""
        try:
            newest = self._newest()
            return {native_id: _status_of(newest.get(_job(native_id))) for native_id in native_ids}
        except SchedulerError as error:
            return dict.fromkeys(native_ids, error)

    def _polled(self, native_id: str) -> Status | SchedulerError | None:
        try:
            job_id = _job(native_id)
            with self._slice_lock(job_id) as acquired:
                state = self._read(job_id)
                if state is None:
                    return None
                if acquired:
                    return self._step(state)
            placement = self._placement(state)
            status = None if placement is None else placement.poll()
            if status is not None:
                return replace(status, state=State.RUNNING) if status.state.final else status
            return _queued(state, f"another client waits for {state.name}")
        except SchedulerError as error:
            return error

    # The steps of a poll, with the lock held.

    def _step(self, state: _Slice) -> Status:
        if state.end is not None:
            return self._delete(state)
        if state.preempted:
            return self._next(state)
        stage, message = self._stage(state)
        placement = self._placement(state)
        if self._cancelled(state.job_id) and (placement is None or stage in ("gone", "preempted")):
            return self._end(state, _CANCELLED)
        if stage == "preempted":
            return self._next(state)
        if stage == "failed":
            reason = Reason.NODE_FAILURE if state.ready_at else Reason.NO_CAPACITY
            return self._fail(state, reason, message)
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
        status = None if placement is None else placement.poll()
        if placement is None or status is None:
            return self._end(state, _CANCELLED) if self._cancelled(state.job_id) else self._start(state)
        if status.attempt > state.latest:
            state.latest = status.attempt
            self._write(state)
        if not status.state.final:
            if self._cancelled(state.job_id):
                placement.target.cancel(placement.native_id)
            return status
        if status.reason is Reason.PREEMPTED:
            return self._move_on(state, status)
        if (pending := self._unless_preempted(state, status, State.RUNNING)) is not None:
            return pending
        self._archive_logs(state.job_id, placement)
        return self._end(state, status)

    def _unless_preempted(self, state: _Slice, failed: Status, pending: State) -> Status | None:
        """Return None if a failure is the job's end, or the job's status if its slice was preempted, or may have been.

        The hosts of a preempted slice fail before the API reports it: until then the job is `pending`.
        """
        if not (self._options.spot and state.ready_at and failed.reason in _OF_PREEMPTION):
            return None
        stage, _ = self._stage(state)
        if stage == "preempted":
            return self._next(state)
        if stage != "ready" or failed.reason not in _OF_LOST_HOSTS:
            return None
        if not state.failed_at:
            state.failed_at = failed.observed_at
            self._write(state)
        if time.time() - state.failed_at >= _STALE_STATUS_S:
            return None
        return replace(failed, state=pending, message=f"{failed.message}; was it preempted?")

    def _result_in_bucket(self, state: _Slice, message: str) -> Status:
        """Return the job's end from the bucket, after the slice has deleted itself."""
        url = result_url(self._options, state.name, state.job_id)
        result = self._api.read(url) if url else None
        if result is None:
            message += " before the job's result was read; checkpoint_uri stores the result, keep: true keeps the slice"
            return self._fail(state, Reason.LOST, message)
        try:
            status = Status.from_json(json.loads(result))
        except ValueError as error:
            message += f", and its result in the bucket is damaged: {error}"
            return self._fail(state, Reason.LOST, message)
        finish = self._move_on if status.reason is Reason.PREEMPTED else self._end
        return finish(state, status)

    def _start(self, state: _Slice) -> Status:
        target, reached = self._target(state), False
        try:
            target.wait_reachable()
            reached = True
            plan = self._plan(state.job_id)
            settings = json.loads(plan.files["settings.json"]) | {"attempt": state.attempt}
            target.submit(replace(plan, files={"settings.json": json.dumps(settings)}))
            return _queued(state, f"starting on {state.name}")
        except SchedulerError as error:
            # A slice may be READY before its servers are.
            early = not reached and time.time() - state.ready_at < self._options.start_timeout_s
            if early or isinstance(error, Unreachable):
                return _queued(state, str(error))
            reason = getattr(error, "reason", Reason.SETUP)
            failed = Status(state=State.FAILED, reason=reason, attempt=state.latest, message=str(error))
            return self._unless_preempted(state, failed, State.QUEUED) or self._end(state, failed)

    def _await(self, state: _Slice, stage: str, message: str) -> Status:
        """Return the status of a job whose slice is not READY. Request a missing one, unless there can be none."""
        if stage == "waits" and (state.ready_at or self._options.queued):  # a queued resource expires by itself
            return _queued(state, message)
        name, now, limit = state.name, time.time(), self._options.valid_until_duration
        slice_api = self._api_of(state)
        try:
            if state.operation:
                slice_api.check_creation(state.operation)
            if now >= state.began + (tpu_options.seconds(limit) or 0):
                return self._fail(state, Reason.NO_CAPACITY, f"no capacity for {name} within {limit}")
            if stage == "waits":
                return _queued(state, message)
            if now >= state.again_at:
                self._create(state)
        except api.Retryable as failure:
            if stage == "waits":  # the failed creation has left it
                slice_api.delete(name, queued=self._options.queued)
            pause = min(max(now - state.began, _RETRY_PAUSES_S[0]), _RETRY_PAUSES_S[1])
            state.operation, state.again_at = "", now + pause
            self._write(state)
            return replace(_queued(state, str(failure)), reason=failure.reason)
        except api.TpuApiError as refusal:
            return self._fail(state, refusal.reason, str(refusal))
        reason = Reason.NO_CAPACITY if state.again_at else Reason.NONE
        return replace(_queued(state, f"{name} is requested"), reason=reason)

    def _move_on(self, state: _Slice, status: Status) -> Status:
        """Move ranks that were warned and left a checkpoint to the next slice, at most 10 times."""
        if state.left == _MAX_MOVES:
            message = f"the ranks have left {state.left + 1} slices after preemption warnings"
            return self._end(state, replace(status, message=message))
        state.left += 1
        return self._next(state)

    def _next(self, state: _Slice) -> Status:
        """Delete a preempted slice and request the next."""
        if self._cancelled(state.job_id):
            return self._end(state, _CANCELLED)
        if not state.preempted:
            state.preempted = True
            self._write(state)
        name = state.name
        self._api_of(state).delete(name, queued=self._options.queued)
        Path(self._placement_path(state.job_id)).unlink(missing_ok=True)
        attempt = max(state.attempt, state.latest) + 1
        state = _Slice(
            job_id=state.job_id, attempt=attempt, latest=attempt, began=time.time(), left=state.left,
            project=state.project,
        )  # fmt: skip
        self._write(state)
        status = self._await(state, "gone", "")
        if status.state.final:
            return status
        return replace(status, reason=Reason.PREEMPTED, message=f"{name} was preempted; {status.message}")

    def _fail(self, state: _Slice, reason: Reason, message: str) -> Status:
        failed = Status(state=State.FAILED, reason=reason, attempt=state.latest, message=message)
        return self._end(state, failed)

    def _end(self, state: _Slice, status: Status) -> Status:
        state.end = status.to_json()
        self._write(state)
        return self._delete(state)

    def _delete(self, state: _Slice) -> Status:
        """Delete the job's slices, unless the last is kept. Return the job's end. Raises Unreachable to try again."""
        status, name = Status.from_json(state.end), state.name
        keep_last = self._options.keep and bool(state.ready_at)
        # All of them: the deletion of an earlier one may have failed.
        for attempt in reversed(range(state.attempt + (not keep_last))):
            try:
                self._api_of(state).delete(node_id(state.job_id, attempt), queued=self._options.queued)
            except api.TpuApiError as error:
                status = _with_message(status, str(error))
        if keep_last:
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(state.ready_at))
            return _with_message(status, f"slice {name} is up since {since} (keep: accel prune deletes it)")
        return status

    # Other operations of the target.

    def _archive_logs(self, job_id: str, placement: JobPlacement) -> None:
        """Archive the lines that the hosts have now."""
        path = self._file(job_id, "slice.log")
        with open(f"{path}.new", "wb") as file, contextlib.suppress(Unreachable):
            for line in placement.lines(Cursor()):
                file.write(json.dumps(dataclasses.asdict(line)).encode() + b"\n")
        os.replace(f"{path}.new", path)

    def logs(self, native_id: str, since: Cursor | None = None) -> Iterator[LogLine]:
        """Yield the hosts' lines or, if the hosts are gone, the archived ones."""
        start, placement = since or Cursor(), self._current_placement(native_id)
        if placement is not None:
            yield from placement.lines(start)
        elif os.path.exists(path := self._file(_job(native_id), "slice.log")):
            with open(path, "rb") as file:
                lines = (LogLine(**json.loads(line)) for line in file)
                yield from (line for line in lines if int(line.position) > int(start.position(line.source) or 0))

    def cursor_at(self, native_id: str, when: float) -> Cursor:
        placement = self._current_placement(native_id)
        if placement is None:
            return Cursor()
        return placement.target.cursor_at(placement.native_id, when).under(placement.prefix)

    def tail_at(self, native_id: str, since: Cursor, count: int) -> Cursor | None:
        placement = self._current_placement(native_id)
        if placement is None:
            return None
        cursor = since.moved({})
        host_cursor = placement.target.tail_at(placement.native_id, since.below(placement.prefix), count)
        cursor.move((host_cursor or Cursor()).under(placement.prefix))
        return cursor

    def wait(self, native_id: str, timeout_s: float) -> bool | None:
        """As `HostsTarget.wait`; None if the job has no hosts."""
        placement = self._current_placement(native_id)
        return None if placement is None else placement.target.wait(placement.native_id, timeout_s)

    def cancel(self, native_id: str) -> None:
        """Cancel a running job gracefully. Delete the slice if no job runs there or its hosts are unreachable."""
        job_id = _job(native_id)
        state = self._read(job_id)
        if state is None:
            return
        Path(self._file(job_id, "slice.cancel")).touch()  # for a client that is about to start it
        placement = self._current_placement(native_id)
        if placement is not None:
            with contextlib.suppress(Unreachable):
                placement.target.cancel(placement.native_id)
                return
        if state.end is None:
            self._api_of(state).delete(state.name, queued=self._options.queued)

    def find(self, job_id: str) -> DiscoveredJob | None:
        """Find a job of this machine whose slice exists or was requested."""
        state = self._read(job_id)
        if state is None:
            name = node_id(job_id, 0)
            raise UnknownJob(f"no job {job_id} here; to find it by its slice, use a tpu target with name: {name}")
        if state.end is None and self._stage(state)[0] == "gone":
            return None
        plan = self._plan(job_id)
        spec = JobSpec.from_json(json.loads(plan.files["settings.json"])["spec"])
        return DiscoveredJob(native_id=f"accel-{job_id}/{job_id}", spec=spec, plan=plan)

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
        return [
            JobSummary(
                job_id=job_id, native_id=f"accel-{job_id}/{job_id}", name=created.name, created_at=created.created_at,
                nodes=hosts_of(created.accelerator_type or None, None, None) or 1,
            )
            for job_id, created in self._newest().items()
        ]  # fmt: skip

    def _newest(self) -> dict[str, api.CreatedSlice]:
        """Return the newest slice of each job in the zone."""
        oldest_first = sorted(self._api.created_slices(), key=lambda created: created.created_at)
        return {created.job_id: created for created in oldest_first}

    def check(self, gpus: int = 0) -> CheckReport:
        """List the zone's slices that accel created, and their queued resources. Warn of those with an unknown job."""
        rows, unknown = [], []
        for created in self._api.created_slices():
            rows.append([created.name, created.state, created.accelerator_type, created.job_id])
            if not os.path.exists(self._file(created.job_id, "slice.json")):
                unknown.append(f"{created.name}: job {created.job_id} is not known here")
        return CheckReport(table=[["slice", "state", "type", "job"], *rows], failures=(), warnings=tuple(unknown))

    def close(self) -> None:
        for target in self._targets.values():
            target.close()

    # Helpers.

    def _api_of(self, state: _Slice | None) -> api.Api:
        """Return a client for the project of the slice, which may not be the one that the environment selects now."""
        if state is None or state.project in ("", self._options.project):
            return self._api
        return self._apis.setdefault(state.project, api.Api(replace(self._options, project=state.project), self.name))

    def _candidates(self) -> str:
        return f"the hosts of the slice in {self._options.zone}"

    def _stage(self, state: _Slice) -> tuple[str, str]:
        name, slice_api = state.name, self._api_of(state)
        queued = slice_api.get(name, queued=True) if self._options.queued else None
        return slices.stage(name, slice_api.get(name), queued)

    def _target(self, state: _Slice) -> SliceTarget:
        name = state.name
        if name not in self._targets:
            options = tpu_options.existing(self._options, name)
            if state.project:
                options = replace(options, project=state.project)
            self._targets[name] = SliceTarget(replace(self._context, options=options))
        return self._targets[name]

    def _placement(self, state: _Slice) -> JobPlacement | None:
        """Return where the job is on the slice's hosts; None before it is sent there, and after its end."""
        native = self._placed_native_id(state.job_id)
        if native is None or state.end is not None or not native.startswith(f"{state.name}-w"):
            return None
        return JobPlacement(self._target(state), native, f"{state.attempt}.")

    def _current_placement(self, native_id: str) -> JobPlacement | None:
        job_id = _job(native_id)
        state = self._read(job_id)
        return None if state is None else self._placement(state)

    def _create(self, state: _Slice) -> None:
        slice_api = self._api_of(state)
        request = self._body(state.job_id, state.attempt, slice_api.project, host_program("tpu_slice").decode())
        state.operation = slice_api.create(state.name, request, queued=self._options.queued)
        try:
            self._write(state)
        except StoreError as error:  # the slice is requested
            raise Unreachable(str(error)) from None

    def _body(self, job_id: str, attempt: int, project: str, script: str) -> dict[str, Any]:
        parent = f"projects/{project}/locations/{self._options.zone}"
        return api.request_body(self._options, job_id, attempt, parent=parent, script=script)

    def _plan(self, job_id: str) -> Plan:
        return Plan.from_json((atomic_files.read_document(self._file(job_id, "plan.json")) or {}).get("plan"))

    def _cancelled(self, job_id: str) -> bool:
        return os.path.exists(self._file(job_id, "slice.cancel"))

    def _slice_lock(self, job_id: str, *, blocking: bool = False) -> contextlib.AbstractContextManager[bool]:
        return atomic_files.exclusive_lock(self._file(job_id, "slice.lock"), blocking=blocking)

    def _read(self, job_id: str) -> _Slice | None:
        path = self._file(job_id, "slice.json")
        document = atomic_files.read_document(path)
        try:
            return None if document is None else _Slice(**document, job_id=job_id)
        except TypeError as error:
            raise StoreError(f"{path} is damaged: {error}") from None

    def _write(self, state: _Slice) -> None:
        document = dataclasses.asdict(state)
        atomic_files.write_document(self._file(document.pop("job_id"), "slice.json"), document)

    def _file(self, job_id: str, name: str) -> str:
        return str(Path(self._jobs) / job_id / name)


def _status_of(created: api.CreatedSlice | None) -> Status | None:
    """Return what a slice alone shows of its job."""
    if created is None:
        return None
    stage, message = slices.stage(created.name, created.node, created.queued)
    state = State.RUNNING if stage == "ready" else State.QUEUED
    return Status(state=state, native_state=created.state, message=message)


def _queued(state: _Slice, message: str) -> Status:
    return Status(state=State.QUEUED, attempt=state.latest, message=message)


def _with_message(status: Status, message: str) -> Status:
    return replace(status, message=f"{status.message}; {message}" if status.message else message)


def _job(native_id: str) -> str:
    job_id = native_id.rpartition("/")[2]
    if native_id != f"accel-{job_id}/{job_id}":
        raise SpecError(f"{native_id!r} is not the id of a job with a slice of its own (accel-JOB/JOB)")
    return job_id
