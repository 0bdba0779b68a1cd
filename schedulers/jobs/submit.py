"""The steps of a submit: what depends on the current directory, and the one call of the target."""

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
    """The code directory, and where in it the program runs."""
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
    """The target, and the spec with everything that depends on the current directory made absolute."""
    from ..config.named_targets import resolve_target
    from ..target import Grows

    here = os.path.abspath(start or os.getcwd())
    resolved = resolve_target(target_name, store.jobs, start=here, overrides=spec.options)
    if spec.max_nodes is not None and not isinstance(resolved.target, Grows):
        raise SpecError(
            f"--nodes {spec.nodes}:{spec.max_nodes}: jobs of a {resolved.kind} target have one size; give one number"
        )
    code = os.path.normpath(os.path.join(here, spec.code))
    after = tuple(store.record(ref).id for ref in spec.after)
    return resolved, dataclasses.replace(spec, code=code, after=after)


def admit(target: Target, specs: Iterable[JobSpec]) -> None:
    """Raises SpecError for a job that this target knows it cannot run: it is not recorded."""
    from ..target import Admits

    if isinstance(target, Admits):
        for spec in specs:
            target.admit(spec)


def send_many(records: Sequence[Record], target: Sweeps, plans: Sequence[Plan]) -> None:
    """Hands the plans of a sweep to the target at once and records the answers; a refusal is recorded with each job,
    and raised."""
    asked_at = time.time()
    # The first one's lock stands for all: a thousand jobs would need a thousand open files.
    with records[0].submission():
        try:
            native_ids = target.submit_many(plans)
        except Unreachable as error:
            again = f"the {len(records)} jobs are kept as submitting, and `accel status ID` asks again"
            raise Unreachable(f"{error}; {again}") from error
        except SchedulerError as error:
            reason = getattr(error, "reason", Reason.SETUP)
            refused = Status(state=State.FAILED, reason=reason, message=str(error), observed_at=time.time())
            for_each(lambda record: record.update(refused), records)
            raise
        queued = Status(state=State.QUEUED, observed_at=asked_at)
        for_each(lambda pair: pair[0].update(queued, pair[1]), list(zip(records, native_ids, strict=True)))


def for_each(act: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """What `act`, which writes a job's record, gives for each of `items`, in their order, several at a time.

    When this returns, all of them are on the disk. Raises what the first that failed raised; none is begun after that.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="writing records") as pool:
        return list(pool.map(act, items))


def send(record: Record, target: Target, plan: Plan) -> None:
    """Hands the plan to the target and records the answer; a refusal is recorded, and raised."""
    asked_at = time.time()
    try:
        native_id = target.submit(plan)
    except Unreachable as error:
        # It may have got there all the same, so it is neither failed nor sent again blindly.
        again = f"job {record.id} is kept as submitting, and `accel status {record.id}` asks again"
        raise Unreachable(f"{error}; {again}") from error
    except SchedulerError as error:
        reason = getattr(error, "reason", Reason.SETUP)
        record.update(Status(state=State.FAILED, reason=reason, message=str(error), observed_at=time.time()))
        raise
    # As old as the question: what the job itself has told since then is newer, and stands.
    status = record.update(Status(state=State.QUEUED, observed_at=asked_at), native_id)
    if record.cancel_asked and not status.state.final:
        target.cancel(native_id)  # somebody did not wait for the submit's end
