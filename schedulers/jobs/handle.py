"""`Job`, a handle on a job wherever it runs, and the one way to submit, find and list jobs."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, JobFailed, NotReady, SpecError, StoreNotWritable, SubmitError, Unreachable
from ..job import FUNCTION_FILE, Cursor, JobSpec, LogLine, Reason, Resources, Retry, State, Status
from ..store.store import CorruptRecord, Record, Store
from . import poll as polls
from .follow import Backoff, follow, read_once
from .poll import is_abandoned, poll_all, recover, target_key
from .submit import admit, create_records, default_name, places, prepare, send, send_new

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from ..job import Entry
    from ..target import Plan, Target

_CANCEL_ALLOWANCE_S = 60.0  # after the grace period: for SIGKILL, and until its effect is reported


def submit(
    script: str | os.PathLike[str] | Callable[..., object],
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    target: str = "local",
    entry: Entry = "script",
    name: str | None = None,
    nodes: int = 1,
    procs_per_node: int | None = None,
    gpus: int = 0,
    cpus: int | None = None,
    memory_gb: float | None = None,
    env: Mapping[str, str | float] | None = None,
    secrets: Mapping[str, str] | None = None,
    code: str | os.PathLike[str] | None = None,
    time_limit_s: float | None = None,
    grace_s: float = 30.0,
    max_restarts: int = 0,
    after: Sequence[str | Job] = (),
    options: Mapping[str, Any] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Job:
    """Submit a job and return its handle. The job does not depend on this process.

    The program runs in `cwd` (default: the current directory), seen inside `code`, the directory that is shipped
    (default: `cwd`). Relative paths, and the project's accel.yaml, are resolved from `cwd`.

    Instead of a script, a function may be given: every rank calls it with `args` and `kwargs`, any values that
    cloudpickle can pickle, and `Job.result` returns what rank 0's call returned.

    Raises SpecError for a job that cannot run there, UnknownTarget or ConfigError, SubmitError if the target
    rejects it (the job is then kept as failed), Unreachable if the target cannot be reached (kept as submitting).
    """
    base_dir = os.path.abspath(os.fspath(cwd)) if cwd is not None else os.getcwd()
    top, workdir = places(base_dir, code, explicit=cwd is not None)
    files: dict[str, bytes] = {}
    if callable(script):
        from .function import name_of, pack

        argv, files[FUNCTION_FILE] = pack(script, args, kwargs or {})
        entry, default = "module", name_of(script)
    else:
        if kwargs:
            raise SpecError("kwargs are for functions: give a script its arguments in args")
        argv, default = (os.fspath(script), *args), default_name(os.fspath(script), entry)
    spec = JobSpec(
        argv=argv,
        entry=entry,
        name=default if name is None else name,
        nodes=nodes,
        procs_per_node=procs_per_node,
        resources=Resources(gpus=gpus, cpus=cpus, memory_gb=memory_gb),
        env=dict[str, Any](env or {}),  # JobSpec converts numbers
        secrets=dict(secrets or {}),
        code=top,
        workdir=workdir,
        time_limit_s=time_limit_s,
        grace_s=grace_s,
        retry=Retry(max_restarts=max_restarts),
        after=tuple(job.id if isinstance(job, Job) else job for job in after),
        options=dict(options or {}),
    )
    return submit_spec(spec, target, start=base_dir, files=files)


async def submit_async(
    script: str | os.PathLike[str] | Callable[..., object], args: Sequence[Any] = (), **options: Any
) -> Job:
    """Run `submit`, with the same arguments, in a thread."""
    import asyncio

    return await asyncio.to_thread(submit, script, args, **options)


def submit_spec(
    spec: JobSpec,
    target_name: str,
    store: Store | None = None,
    *,
    start: str | Path | None = None,
    files: Mapping[str, bytes] | None = None,
    job_id: str | None = None,
) -> Job:
    """Submit the spec. Every submit ends here.

    files:  name -> content, of further files in the job's directory.
    job_id: a new id of the store, if the caller has made one; StoreError if there is a job of that id.

    The intent is on disk before the target is called, so that a crash between the two neither loses the job nor
    starts it twice. Raises what `submit` raises.
    """
    store = store or Store.default()
    resolved, spec = prepare(spec, target_name, store, start)
    job_id = job_id or store.new_id()
    plan = resolved.plan(spec, job_id)
    admit(resolved.target, [spec])
    (record,) = create_records(store, resolved, [(job_id, spec, plan)], files)
    with record.submission():
        send_new(store, [record], resolved.target, lambda: [resolved.target.submit(plan)])
    return Job(record, target=resolved.target)


def dry_run(
    spec: JobSpec, target_name: str, job_id: str, store: Store | None = None, *, start: str | Path | None = None
) -> Plan:
    """Return the plan that `submit_spec` would carry out; write and query nothing. Raises SpecError, ConfigError."""
    resolved, spec = prepare(spec, target_name, store or Store.default(), start)
    return resolved.plan(spec, job_id)


def find(
    ref: str, store: Store | None = None, *, target: str | None = None, options: Mapping[str, Any] | None = None
) -> Job:
    """Return the job with that id or unique prefix; `@last` is the newest.

    With a `target` (and `options` for it, as for `submit`), a job that is unknown here is looked up there by its
    full id and recorded here. Raises UnknownJob, StoreError, and with a target the errors of querying it.
    """
    return find_all([ref], store, target=target, options=options)[0]


def find_all(
    refs: Sequence[str],
    store: Store | None = None,
    *,
    target: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Job]:
    """Return what `find` returns for each of `refs`. Jobs of one target share it and its connections."""
    from .attach import find_or_attach

    store = store or Store.default()
    shared: dict[str, Target] = {}
    jobs = []
    for ref in refs:
        record, resolved = find_or_attach(ref, store, target, options or {})
        if resolved is not None:
            shared.setdefault(target_key(record), resolved.target)
        jobs.append(Job(record, shared=shared))
    return jobs


def list_jobs(
    refresh: bool = True, store: Store | None = None, *, ids: Sequence[str] | None = None
) -> list[Record | CorruptRecord]:
    """Return all jobs, newest first; with `ids`, read and poll only these. Raises StoreError.

    `refresh` polls every target once for all its jobs that are not over. If a target cannot be polled, their
    status stays unchanged and `Record.warning` has the reason.
    """
    store = store or Store.default()
    records = store.records(ids)
    if refresh:
        live = [r for r in records if isinstance(r, Record) and not r.status.state.final]
        if live:
            poll_all(live)
    return records


def refresh(jobs: Sequence[Job]) -> None:
    """Poll each target once for those of these jobs that are not over, as `list_jobs` does. Raises StoreError."""
    live = [job for job in jobs if not job.record.reload().status.state.final]
    shared: dict[str, Target] = {}
    for job in live:
        shared |= job._shared
    poll_all([job.record for job in live], shared)
    for job in live:
        job._shared |= {key: target for key, target in shared.items() if key == target_key(job.record)}


class Job:
    """A handle on one job. Caches its stored state; any number of handles, in any processes, may be used."""

    def __init__(
        self, record: Record, *, target: Target | None = None, shared: dict[str, Target] | None = None
    ) -> None:
        """Create a handle. `shared`: a cache of targets, where this job's is looked up or added."""
        self.record = record
        self._cached_target = target
        self._shared = {} if shared is None else shared
        self._problem: Unreachable | None = None  # of the last poll
        self._unrecorded = ""  # why the request to cancel is not recorded

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.name!r} on {self.target}: {self.record.status.state.value}>"

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def target(self) -> str:
        """The name of the job's target."""
        return self.record.target

    @property
    def native_id(self) -> str | None:
        """The backend's own id; None until the backend has confirmed the job."""
        return self.record.native_id

    @property
    def spec(self) -> JobSpec:
        return self.record.spec()

    @property
    def cancel_timeout_s(self) -> float:
        """Return the seconds that a cancelled job may take to end. Raises ConfigError as `cancel` does."""
        grace_s: float = getattr(self._target(), "grace_s", self.spec.grace_s)
        return grace_s + _CANCEL_ALLOWANCE_S

    def status(self, refresh: bool = True) -> Status:
        """Return the job's status. With `refresh`, poll its backend first, unless the job is over.

        If the backend cannot be reached, returns the last status, with its `observed_at`; `record.warning` has the
        reason. A submit that a crash cut off is carried out now (see `resume_submit`). Raises StoreError, and
        ConfigError if the target cannot be constructed.
        """
        status = self.record.reload().status
        if not refresh or status.state.final:
            return status
        if self.record.incomplete:
            try:
                return self.resume_submit()
            except StoreNotWritable as error:
                self.record.warning = str(error)
                return self.record.status
        self._problem = None
        try:
            return polls.apply_poll(self.record, polls.poll_target([self.record], self._target())[self.id])
        except Unreachable as error:
            self._problem, self.record.warning = error, str(error)
            return self.record.status

    def wait(self, timeout: float | None = None) -> Status:
        """Wait until the job is over; return its status.

        Raises TimeoutError after `timeout` seconds, and what `status` raises.
        """
        return self._wait(timeout, None)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for a job of a function, and return what rank 0's call returned.

        The value is unpickled, which runs code that the job wrote. Raises JobFailed, with the status's message, if
        the job failed or was cancelled; TimeoutError after `timeout` seconds; SpecError for a job of a script.
        """
        from .function import read_result

        if not self.spec.calls_function:
            raise SpecError(f"job {self.id} runs a program, not a function: it has no result")
        status = self.wait(timeout)
        if status.state is not State.SUCCEEDED:
            reason = "" if status.reason is Reason.NONE else f" ({status.reason.value})"
            raise JobFailed(f"job {self.id} {status.state.value}{reason}: {status.message}")
        return read_result(self.record, self.fetch)

    def logs(
        self,
        *,
        follow: bool = False,
        ranks: Collection[int] | None = None,
        since: Cursor | str | float | None = None,
        tail: int | None = None,
    ) -> Iterator[LogLine]:
        """Return the existing lines; with `follow`, also those to come, each exactly once and complete.

        Following ends when the job is over and all its lines were yielded. It continues while the backend cannot be
        reached; without `follow` that raises Unreachable.

        ranks: only these ranks (which excludes the launcher's own lines).
        since: a cursor, or its text: only later lines; or a time in seconds since the epoch, to the second.
               Raises SpecError for a time if the target does not know when its lines were written.
        tail:  only the last `tail` existing lines of each rank.
        """
        return self._logs(follow, ranks, since, tail, None)

    def cancel(self, wait: bool = True) -> Status:
        """Cancel the job: SIGTERM, then SIGKILL after its grace period.

        Of a job that is over, only the parts that still run are cancelled. With `wait`, returns when the job is over,
        or its status a minute after the grace period, which is 120 s on SageMaker. A job that is being submitted is
        cancelled by its submit as soon as its target has it; one whose submit was cut off, when it is found there.

        Raises Unreachable if the backend of a job that is not over cannot be reached, and what `status` raises.
        """
        status = self.request_cancel()
        if status.state.final:
            return status
        try:
            status = self.wait(self.cancel_timeout_s) if wait else self.status()
        except TimeoutError:
            status = self.record.status
        self.record.warning = self._unrecorded if status.state.final else self.record.warning or self._unrecorded
        return status

    def request_cancel(self, *, refresh: bool = True) -> Status:
        """Record the request and send it to the backend, as `cancel` does; return the job's status before it ends.

        With `refresh` off, the stored status tells whether the job is over: poll it before. `record.warning` says if
        the request could not be recorded.
        """
        status = self.status(refresh=refresh and not self.record.incomplete)
        if status.state.final:
            self.cancel_rest()
            return status
        self._unrecorded = ""
        try:
            self.record.append("cancel", host=os.uname().nodename, pid=os.getpid())
        except StoreNotWritable as error:
            if self.record.incomplete:
                raise
            self._unrecorded = f"the request is not recorded: {error}"
        if self.record.incomplete:
            status = self.status()  # looks for a job whose submit was cut off
        if not status.state.final and self.record.native_id is not None:
            self._target().cancel(self.record.native_id)
            if isinstance(self._problem, polls.OtherBackend):
                raise self._problem
        if status.state is State.SUBMITTING and not self.record.warning:
            host, pid = self.record.submitter
            self.record.warning = (
                f"process {pid} on {host} is submitting job {self.id}: "
                f"accel cancels it once target {self.target} confirms it"
            )
        self.record.warning = self.record.warning or self._unrecorded
        return status

    def cancel_rest(self) -> bool:
        """Cancel the parts of a finished job that still run. Return True if there were any.

        If the target cannot be reached, the job is over all the same; `record.warning` has the reason.
        """
        from ..target import SupportsCancelRest

        if self.native_id is None:
            return False
        try:
            target = self._target()
            return isinstance(target, SupportsCancelRest) and target.cancel_rest(self.native_id)
        except (Unreachable, ConfigError) as error:
            self.record.warning = f"cannot check whether parts of it still run: {error}"
            return False

    def shell(self, node: int, argv: Sequence[str] = (), *, terminal: bool = False) -> int:
        """Run `argv`, or a shell, on a node of the running job with this process's streams; return its exit code.

        Raises SpecError if the target does not support that, and what `SupportsShell.shell` raises.
        """
        from ..target import SupportsShell

        target = self.waiting_target()
        if target is None or self.native_id is None:
            raise SubmitError(f"job {self.id} does not run: its target has not confirmed it yet")
        if not isinstance(target, SupportsShell):
            raise SpecError(self._unsupported("shell"))
        return target.shell(self.native_id, node, argv, terminal=terminal)

    def resume_submit(self) -> Status:
        """Carry out a submit that was cut off: call the target again, which looks for an earlier submit first.

        Does nothing while the submitting process lives: it holds a lock. Where that is uncertain (just after the
        intent was written), the process counts as alive for a minute. A rejection is in the status.
        """
        from ..target import SupportsFind

        with self.record.submission(blocking=False) as acquired:
            status = self.record.reload().status
            if not acquired or status.state.final or not self.record.incomplete or not is_abandoned(self.record):
                return status
            target = self._target()
            try:
                if self.record.cancel_requested and isinstance(target, SupportsFind):
                    polls.find_submitted(self.record, target)
                else:
                    polls.require_backend(self.record, target)
                    plan = self.record.plan()
                    send([self.record], target, lambda: [target.submit(plan)])
            except Unreachable as error:
                self.record.warning = str(error)
            except (SubmitError, SpecError):
                pass  # the status has the reason
            return self.record.status

    def describe(self) -> dict[str, Any]:
        """Return everything that the store holds, in plain JSON values. Polls no backend. Raises StoreError."""
        record = self.record.reload()
        plan = record.plan()
        return {
            "id": record.id,
            "name": record.name,
            "target": record.target,
            "kind": record.kind,
            "native_id": record.native_id,
            "backend": record.backend,
            "directory": record.path,
            "created_at": record.created_at,
            "started_at": record.started_at,
            "ended_at": record.ended_at,
            "status": record.status.to_json(),
            "warning": record.warning,
            "spec": record.spec().to_json(),
            "plan": plan.to_json(),
            "options": record.options() or {},
            "source": plan.source,
            "exit": record.read_exit(),
            "events": [{"event": event.name, "at": event.at, **event.data} for event in record.events()],
        }

    async def status_async(self, refresh: bool = True) -> Status:
        """Run `status` in a thread."""
        import asyncio

        return await asyncio.to_thread(self.status, refresh)

    async def cancel_async(self, wait: bool = True) -> Status:
        """Run `cancel` in a thread."""
        import asyncio

        return await asyncio.to_thread(self.cancel, wait)

    async def wait_async(self, timeout: float | None = None) -> Status:
        """Run `wait` in a thread, which ends within a second of cancellation."""
        import asyncio
        import threading

        stop = threading.Event()
        try:
            return await asyncio.to_thread(self._wait, timeout, stop)
        finally:
            stop.set()

    async def logs_async(
        self,
        *,
        follow: bool = False,
        ranks: Collection[int] | None = None,
        since: Cursor | str | float | None = None,
        tail: int | None = None,
    ) -> AsyncIterator[LogLine]:
        """Run `logs` in a thread, which ends within a second of closing the iterator."""
        import asyncio
        import threading

        stop = threading.Event()
        lines = self._logs(follow, ranks, since, tail, stop)
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                yield line
        finally:
            stop.set()

    def _target(self) -> Target:
        if self._cached_target is None:
            self._cached_target = polls.cached_target(self.record, self._shared)
        return self._cached_target

    def _wait(self, timeout: float | None, stop: threading.Event | None) -> Status:
        backoff = Backoff(stop, None if timeout is None else time.monotonic() + timeout)
        while True:
            status = self.status()
            if status.state.final:
                return status
            if backoff.over:
                raise TimeoutError(f"job {self.id} is not over: it is {status.state.value}")
            backoff.wait_for_change(self.waiting_target(), self.native_id)

    def fetch(self, directory: str | os.PathLike[str]) -> list[str]:
        """Create the directory from the job's results; return the names in it.

        Raises NotReady if the job runs, has left nothing, or the directory exists; SpecError for a kind of target
        that stores no results; Unreachable.
        """
        from pathlib import Path

        from ..target import SupportsFetch

        target = self._target()
        if not isinstance(target, SupportsFetch):
            raise SpecError(f"{self._unsupported('fetch')}: the results of job {self.id} are where it ran")
        return target.fetch(self._confirmed_id(), Path(directory))

    def native(self) -> object:
        """Return the job as an object of the vendor's own library, such as SageMaker's `TrainingJob`.

        Raises ConfigError if that is not installed, NotReady, Unreachable; SpecError for a kind without one.
        """
        from ..target import SupportsNative

        target = self._target()
        if not isinstance(target, SupportsNative):
            raise SpecError(self._unsupported("native"))
        return target.native(self._confirmed_id())

    def _unsupported(self, method: str) -> str:
        from ..target import kinds_with

        return f"{method} is not supported by {self.record.kind} targets (supported by: {kinds_with(method)})"

    def _confirmed_id(self) -> str:
        if self.native_id is None:
            raise NotReady(f"target {self.target} has not confirmed job {self.id} yet")
        return self.native_id

    def waiting_target(self) -> Target | None:
        """Return the target, or None if it has not confirmed the job."""
        return None if self.native_id is None else self._target()

    def _logs(
        self,
        following: bool,
        ranks: Collection[int] | None,
        since: Cursor | str | float | None,
        tail: int | None,
        stop: threading.Event | None,
    ) -> Iterator[LogLine]:
        cursor = self.cursor(since)
        if not following:
            return read_once(self, cursor, ranks, tail)
        return follow(self, cursor, ranks, tail, Backoff(stop, None))

    def cursor(self, since: Cursor | str | float | None) -> Cursor:
        """Return `since`, as for `logs`, as a cursor. Raises SpecError, ConfigError.

        A job whose submit was cut off is looked up on its target first.
        """
        if self.record.reload().native_id is None and not self.record.status.state.final and is_abandoned(self.record):
            recover(self.record, self._target())
        if not isinstance(since, (int, float)):
            return Cursor.parse(str(since)) if since is not None else Cursor()
        from ..target import SupportsCursorAt

        target = self.waiting_target()
        if target is None or self.native_id is None:
            return Cursor()
        if not isinstance(target, SupportsCursorAt):
            raise SpecError(f"target {self.target} does not know when lines were written; give a cursor (logs --json)")
        return target.cursor_at(self.native_id, since)

    def read_logs(self, since: Cursor) -> Iterator[LogLine]:
        """Return the existing lines after the cursor. Raises SubmitError for a job that ended without a native id."""
        status = self.record.status
        if self.native_id is None and status.state.final:
            reason = f": {status.message}" if status.message else ""
            raise SubmitError(
                f"job {self.id} has no logs: {status.state.value} before {self.target} accepted it{reason}"
            )
        target = self.waiting_target()
        return iter(()) if target is None or self.native_id is None else target.logs(self.native_id, since)

    def tail_at(self, since: Cursor, count: int) -> Cursor | None:
        """Return where each rank's last lines begin; None if unsupported. Raises Unreachable."""
        from ..target import SupportsTailAt

        target = self.waiting_target()
        if self.native_id is None or not isinstance(target, SupportsTailAt):
            return None
        return target.tail_at(self.native_id, since, count)
