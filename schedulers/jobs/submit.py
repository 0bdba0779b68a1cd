"""The steps of a submit: paths made absolute, the call of the target, and the record of its answer."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING

from ..errors import SchedulerError, SpecError, Unreachable
from ..job import JobSpec, Reason, State, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path
    from typing import TypeVar

    from ..config.named_targets import ResolvedTarget
    from ..job import Entry
    from ..store.record import Record
    from ..store.store import Store
    from ..target import Plan, Sweeps, Target

    Item = TypeVar("Item")
    Made = TypeVar("Made")

# Jobs whose records are written at a time: a disk that is told to keep many things at once keeps them in one go.
_AT_ONCE = 8


def places(here: str, code: str | os.PathLike[str] | None, *, explicit: bool) -> tuple[str, str]:
    """Return the code directory, and the directory inside it where the program runs."""
    if code is None:
        return here, "."
    here = os.path.realpath(here)
    top = os.path.realpath(os.path.join(here, os.fspath(code)))
    if os.path.commonpath([top, here]) == top:
        return top, os.path.relpath(here, top)
    if explicit:
        raise SpecError(f"cwd {here} is not inside the code directory {top}")
    return top, "."


def default_name(program: str, entry: Entry) -> str:
    last = program.rpartition(".")[2] if entry == "module" else os.path.basename(program)
    stem = os.path.splitext(last)[0] if entry == "script" else last
    return "".join(letter if letter.isprintable() else "_" for letter in stem) or "job"


def prepare(spec: JobSpec, target_name: str, store: Store, start: str | Path | None) -> tuple[ResolvedTarget, JobSpec]:
    """Return the target, and the spec with everything that depends on the current directory made absolute."""
    from ..config.named_targets import resolve_target
    from ..target import Grows, Sizes

    here = os.path.abspath(start or os.getcwd())
    resolved = resolve_target(target_name, store.jobs, start=here, overrides=spec.options)
    if spec.max_nodes is not None and not isinstance(resolved.target, Grows):
        raise SpecError(
            f"--nodes {spec.nodes}:{spec.max_nodes}: jobs of a {resolved.kind} target have one size; give one number"
        )
    if isinstance(resolved.target, Sizes):
        spec = resolved.target.sized(spec)
    code = os.path.normpath(os.path.join(here, spec.code))
    after = tuple(store.record(ref).id for ref in spec.after)
    return resolved, dataclasses.replace(spec, code=code, after=after)


def admit(target: Target, specs: Iterable[JobSpec]) -> None:
    """Raise SpecError for a job that this target knows it cannot run, before it is recorded."""
    from ..target import Admits

    if isinstance(target, Admits):
        for spec in specs:
            target.admit(spec)


def send_many(records: Sequence[Record], target: Sweeps, plans: Sequence[Plan]) -> None:
    """Submit the plans of a sweep in one request and record the results.

    `Record.warning` has the reason why a job was not submitted; an error that all jobs have is raised.
    """
    asked_at = time.time()
    # The first one's lock stands for all: a thousand jobs would need a thousand open files.
    with records[0].submission():
        answers: Sequence[str | SchedulerError]
        try:
            answers = target.submit_many(plans)
        except SchedulerError as error:
            answers = [error] * len(records)
        jobs = list(zip(records, answers, strict=True))
        # All ids are on the disk before a cancel, which may take long, or fail.
        for_each(lambda job: _keep(*job, asked_at), jobs)
        problems = for_each(lambda job: _settle(*job, target), jobs)
    first = problems[0]
    if first is not None and {str(problem) for problem in problems} == {str(first)}:
        if isinstance(first, Unreachable):
            again = f"the {len(records)} jobs are kept as submitting, and `accel status ID` asks again"
            raise Unreachable(f"{first}; {again}") from first
        raise first
    for record, problem in zip(records, problems, strict=True):
        record.warning = record.warning if problem is None else str(problem)


def for_each(act: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """Call `act`, which writes a job's record, for each of `items` in several threads; return the results in order.

    All records are on disk when this returns. Raises the error of the first that failed; none is begun after
    that.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="writing records") as pool:
        return list(pool.map(act, items))


def send(record: Record, target: Target, plan: Plan) -> None:
    """Submit the plan and record the result; a rejection is recorded, and raised."""
    asked_at = time.time()
    answer: str | SchedulerError
    try:
        answer = target.submit(plan)
    except SchedulerError as error:
        answer = error
    _keep(record, answer, asked_at)
    problem = _settle(record, answer, target)
    if isinstance(problem, Unreachable):
        again = f"job {record.id} is kept as {record.status.state.value}, and `accel status {record.id}` asks again"
        raise Unreachable(f"{problem}; {again}") from problem
    if problem is not None:
        raise problem


def _keep(record: Record, answer: str | SchedulerError, asked_at: float) -> None:
    """Record the native id, and a cancel request for a job that has started only in part."""
    native_id = answer if isinstance(answer, str) else getattr(answer, "native_id", None)
    if native_id is None:
        return
    if isinstance(answer, SchedulerError):
        record.append("cancel", host=os.uname().nodename, pid=os.getpid())
    # As old as the question: what the job itself has told since then is newer, and stands.
    known = record.reload().native_id is not None
    status = record.status if known else Status(state=State.QUEUED, observed_at=asked_at)
    record.update(status, native_id, incomplete=record.cancel_asked)


def _settle(record: Record, answer: str | SchedulerError, target: Sweeps | Target) -> SchedulerError | None:
    """Cancel the job if requested, and record a rejection. Return why the job was not submitted."""
    problem = None if isinstance(answer, str) else answer
    if isinstance(problem, Unreachable):
        return problem  # it may have got there all the same, so it is neither failed nor sent again blindly
    if record.cancel_asked and record.native_id is not None and not record.status.state.final:
        try:
            target.cancel(record.native_id)
        except Unreachable as error:  # the submit stays incomplete, and whoever completes it repeats the cancel
            return Unreachable("; ".join(filter(None, (str(problem or ""), f"it is not cancelled: {error}"))))
    if problem is not None:
        reason = getattr(problem, "reason", Reason.SETUP)
        refused = Status(state=State.FAILED, reason=reason, message=str(problem), observed_at=time.time())
        record.update(refused, record.native_id)
    elif record.incomplete:
        record.update(record.status, record.native_id)
    return problem
