"""Jobs whose submit was cut off, or cancelled before it had ended: found on their target, and ended there if asked.

A record in `submitting` says that the backend may have the job, or may get it yet. Nothing here submits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import SchedulerError, UnknownJob
from ..job import State, Status
from .poll import absorb, cut_off

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Found, Target


def recover(record: Record, target: Target) -> None:
    """Records what the target knows of a job whose submit was cut off; does nothing while a process submits it.

    Whatever is not known is a warning on the record. Raises StoreError.
    """
    from ..target import Finds

    with record.submission(blocking=False) as ours:
        if not ours or record.reload().native_id is not None or record.status.state.final:
            return
        if not isinstance(target, Finds):
            record.warning = _hint(record)
            return
        try:
            known = find_submitted(record, target, target.find)
        except (SchedulerError, OSError) as error:
            record.warning = str(error)
            return
        if not known and not record.cancel_asked:
            record.warning = _hint(record)


def find_submitted(record: Record, target: Target, find: Callable[[str], Found | None]) -> bool:
    """Looks for the job on its target, with `find`, and records its state. One that somebody has cancelled is ended.

    False when the target does not have it: a cancelled job is over when that is still so a minute later. To be called
    with the submission's lock held. Raises what asking the target raises, and StoreError.
    """
    asked_at = time.time()
    try:
        found = find(record.id)
    except UnknownJob:  # put there and not started
        found = None
    if found is None:
        if record.cancel_asked:
            absorb(record, None, asked_at)
        return False
    answer = target.poll([found.native_id]).get(found.native_id)
    status = answer or Status(state=State.QUEUED, observed_at=asked_at)
    # Where something may be missing, the submit is still to be carried out; not if the job is over, or to end.
    complete = found.whole or status.state.final or record.cancel_asked
    absorb(record, status, asked_at, found.native_id if complete else None)
    if record.cancel_asked and not record.status.state.final:
        target.cancel(found.native_id)
    return True


def _hint(record: Record) -> str:
    if not cut_off(record):
        return ""
    return f"its submit was cut off; `accel status {record.id}` carries it out"
