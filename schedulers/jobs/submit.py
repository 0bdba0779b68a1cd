"""The steps of a submit: paths made absolute, the call of the target, and the record of its answer."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import TYPE_CHECKING

from ..errors import ConfigError, CredentialsExpired, SchedulerError, SpecError, Unreachable
from ..hints import check_program
from ..job import FUNCTION_MODULE, JobSpec, Reason, State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from typing import TypeVar

    from ..config.named_targets import ResolvedTarget
    from ..job import Entry
    from ..store.record import Record
    from ..store.store import Store
    from ..target import Plan, Target

    Item = TypeVar("Item")
    Result = TypeVar("Result")

# Threads that write records: a disk flushes concurrent writes together.
_MAX_WORKERS = 8
_END_S, _POLL_S = 30.0, 0.5  # for which a job that started in part may take to end, and between the polls of it


def places(base_dir: str, code: str | os.PathLike[str] | None, *, explicit: bool) -> tuple[str, str]:
    """Return the code directory, and the directory inside it where the program runs."""
    if code is None:
        return base_dir, "."
    base_dir = os.path.realpath(base_dir)
    top = os.path.realpath(os.path.join(base_dir, os.fspath(code)))
    if os.path.commonpath([top, base_dir]) == top:
        return top, os.path.relpath(base_dir, top)
    if explicit:
        raise SpecError(f"cwd {base_dir} is not inside the code directory {top}")
    return top, "."


def default_name(program: str, entry: Entry) -> str:
    last = program.rpartition(".")[2] if entry == "module" else os.path.basename(program)
    stem = os.path.splitext(last)[0] if entry == "script" else last
    return "".join(char if char.isprintable() else "_" for char in stem) or "job"


def prepare(spec: JobSpec, target_name: str, store: Store, start: str | Path | None) -> tuple[ResolvedTarget, JobSpec]:
    """Return the target, and the spec with everything that depends on the current directory made absolute."""
    from ..config.named_targets import resolve_target

    base_dir = os.path.abspath(start or os.getcwd())
    resolved = resolve_target(target_name, store.jobs, start=base_dir, overrides=spec.options)
    spec = sized(spec, resolved)
    code = os.path.normpath(os.path.join(base_dir, spec.code))
    after = tuple(store.record(ref).id for ref in spec.after)
    check_program(spec.entry, spec.argv[0], os.path.join(code, spec.workdir))
    return resolved, dataclasses.replace(spec, code=code, after=after)


def sized(spec: JobSpec, resolved: ResolvedTarget) -> JobSpec:
    """Return the job with its number of nodes, if the target determines it. Raises SpecError."""
    from ..target import SupportsGrows, SupportsSized

    if spec.max_nodes is not None and not isinstance(resolved.target, SupportsGrows):
        raise SpecError(
            f"--nodes {spec.nodes}:{spec.max_nodes}: jobs of a {resolved.kind} target have one size; give one number"
        )
    return resolved.target.sized(spec) if isinstance(resolved.target, SupportsSized) else spec


def admit(target: Target, specs: Iterable[JobSpec]) -> None:
    """Raise SpecError for a job that this target knows it cannot run, before it is recorded."""
    from ..target import SupportsAdmit

    if isinstance(target, SupportsAdmit):
        for spec in specs:
            target.admit(spec)


def create_records(
    store: Store,
    resolved: ResolvedTarget,
    jobs: Sequence[tuple[str, JobSpec, Plan]],
    files: Mapping[str, bytes] | None = None,
) -> list[Record]:
    """Record the intent to submit the jobs, with the backend that a submit now would use, if that can tell.

    files: name -> content, of further files in each job's directory.

    Raises ConfigError if the credentials have expired, SpecError for a sweep that the backend would refuse as too
    large, and then records nothing.
    """
    from ..target import SupportsAdmitMany, SupportsBackends

    if not files and any(spec.calls_function for _, spec, _ in jobs):
        raise SpecError(f"{FUNCTION_MODULE} runs in jobs that accel.submit(FUNCTION) makes: submit the function")
    backends: Mapping[str, str] = {}
    if isinstance(resolved.target, SupportsBackends):
        try:
            backends = resolved.target.backends({job_id: None for job_id, _, _ in jobs})
        except CredentialsExpired as error:
            raise ConfigError(str(error)) from None
        except Unreachable:  # the submit then reports it
            pass
    if len(jobs) > 1 and isinstance(resolved.target, SupportsAdmitMany):
        resolved.target.admit_many(len(jobs))

    def create(job: tuple[str, JobSpec, Plan]) -> Record:
        name, kind, backend = resolved.name, resolved.kind, backends.get(job[0], "")
        return store.create(*job, target=name, kind=kind, options=resolved.options, backend=backend, files=files)

    return for_each(create, jobs)


def send(records: Sequence[Record], target: Target, submit: Callable[[], Sequence[str | SchedulerError]]) -> None:
    """Call `submit`, which returns a native id or an error for each job, and record the results.

    An error that all jobs have is raised; otherwise `Record.warning` has the reason why a job was not submitted.
    """
    sent_at = time.time()
    outcomes: Sequence[str | SchedulerError]
    try:
        outcomes = submit()
    except SchedulerError as error:
        outcomes = [error] * len(records)
    jobs = list(zip(records, outcomes, strict=True))
    # All ids are on the disk before a cancel, which may take long, or fail.
    for_each(lambda job: _record_native_id(*job, sent_at), jobs)
    _record_backends(records, target)
    problems = for_each(lambda job: _cancel_or_record(*job, target), jobs)
    first = problems[0]
    if first is not None and {str(problem) for problem in problems} == {str(first)}:
        if isinstance(first, Unreachable):
            subject, job_id = f"job {records[0].id} is", records[0].id
            if len(records) > 1:
                subject, job_id = f"the {len(records)} jobs are", "ID"
            hint = f"{subject} kept as {records[0].status.state.value}, and `accel status {job_id}` tries again"
            raise Unreachable(f"{first}; {hint}") from first
        raise first
    for record, problem in zip(records, problems, strict=True):
        record.warning = record.warning if problem is None else str(problem)


def send_new(
    store: Store, records: Sequence[Record], target: Target, submit: Callable[[], Sequence[str | SchedulerError]]
) -> None:
    """Do what `send` does for jobs that were just recorded. A SpecError of all leaves no record, as one before does."""
    try:
        send(records, target, submit)
    except SpecError:
        store.delete(record.id for record in records)
        raise


def for_each(act: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call `act`, which writes a job's record, for each of `items` in several threads; return the results in order.

    All records are on disk when this returns. Raises the error of the first that failed; no call starts after
    that.
    """
    items = list(items)
    if len(items) == 1:
        return [act(items[0])]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=_MAX_WORKERS, thread_name_prefix="writing records") as pool:
        return list(pool.map(act, items))


def _record_backends(records: Sequence[Record], target: Target) -> None:
    """Record the backends that only the submit has chosen, such as hosts. If that fails, the first poll repeats it."""
    from .poll import identify

    unidentified = {record.id: record for record in records if record.native_id is not None and not record.backend}
    with contextlib.suppress(SchedulerError):
        for job_id, backend in identify(target, unidentified.values()).items():
            unidentified[job_id].identify(backend)


def _record_native_id(record: Record, outcome: str | SchedulerError, sent_at: float) -> None:
    """Record the native id, and a cancel request for a job that has started only in part."""
    native_id = outcome if isinstance(outcome, str) else getattr(outcome, "native_id", None)
    if native_id is None:
        return
    if isinstance(outcome, SchedulerError):
        record.append("cancel", host=os.uname().nodename, pid=os.getpid())
    # With the time of the submit: a status that the job has written since is newer, and stays.
    confirmed = record.reload().native_id is not None
    status = record.status if confirmed else Status(state=State.QUEUED, observed_at=sent_at)
    record.update(status, native_id, incomplete=record.cancel_requested)


def _cancel_or_record(record: Record, outcome: str | SchedulerError, target: Target) -> SchedulerError | None:
    """Cancel the job if requested, and record a rejection. Return why the job was not submitted.

    A job that the backend has taken, if only in part, has failed once the backend has confirmed that it is over.
    """
    problem = None if isinstance(outcome, str) else outcome
    if isinstance(problem, Unreachable):
        return problem  # the target may have the job: it is neither failed nor sent again blindly
    if record.native_id is not None and not record.status.state.final:
        unconfirmed = ""
        try:
            if record.cancel_requested:
                target.cancel(record.native_id)
            if problem is not None and not _is_over(record, target):
                unconfirmed = f"{record.native_id} has not ended"
        except SchedulerError as error:  # the submit stays incomplete; its completion repeats the cancel
            unconfirmed = f"{record.native_id} may still run: {error}"
        if unconfirmed:
            return Unreachable("; ".join(filter(None, (str(problem or ""), unconfirmed))))
    if problem is not None:
        reason = getattr(problem, "reason", Reason.SETUP)
        status = Status(state=State.FAILED, reason=reason, message=str(problem), observed_at=time.time())
        record.update(status, record.native_id)
    elif record.incomplete:
        record.update(record.status, record.native_id)
    return problem


def _is_over(record: Record, target: Target) -> bool:
    """Poll a job that started in part; if it was cancelled, until it is over or `_END_S` pass. Raises Unreachable."""
    from .poll import poll_target

    deadline = time.monotonic() + (_END_S if record.cancel_requested else 0.0)
    while True:
        answer = poll_target([record], target)[record.id]
        if isinstance(answer, Unreachable):
            raise answer
        if answer.status is None or answer.status.state.final:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
