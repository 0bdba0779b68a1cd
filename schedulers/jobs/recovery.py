"""Recovery of jobs whose submit was cut off, or cancelled before it ended: found and cancelled on their target.

For a record that is `incomplete`, the backend may have the job, or a part of it. Nothing here submits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import SchedulerError, UnknownJob
from ..job import State, Status
from .apply import absorb, cut_off

if TYPE_CHECKING:
    from ..store.record import Record
    from ..target import Target


def recover(record: Record, target: Target) -> None:
    """Record the target's state of a job whose submit was cut off; do nothing while a process submits it.

    An error, or a job that is not found, becomes a warning on the record. Raises StoreError.
    """
    with record.submission(blocking=False) as ours:
        if not ours or not record.reload().incomplete or record.status.state.final:
            return
        try:
            known = find_submitted(record, target) or record.status.state.final
            if not known and not record.warning and cut_off(record):
                record.warning = f"its submit was cut off; `accel status {record.id}` carries it out"
        except (SchedulerError, OSError) as error:
            record.warning = str(error)


def find_submitted(record: Record, target: Target) -> bool:
    """Look for the job on its target and record its native id and state. Return False if it is not found.

    Returns False also for a target that cannot find jobs. A job with a cancel request is cancelled; its submit
    stays incomplete until the target has confirmed that. If the target still does not have such a job a minute
    later, it is over. Call it with the submission's lock held. Raises the errors of querying the target,
    StoreError.
    """
    from ..target import Finds

    if not isinstance(target, Finds):
        return False
    asked_at = time.time()
    try:
        found = target.find(record.id)
    except UnknownJob:  # put there and not started
        found = None
    if found is None:
        if record.cancel_asked:
            absorb(record, None, asked_at)
        return False
    record.update(record.status, found.native_id, incomplete=record.cancel_asked or not found.whole)
    answer = target.poll([found.native_id]).get(found.native_id)
    absorb(record, answer or Status(state=State.QUEUED, observed_at=asked_at), asked_at)
    if record.cancel_asked and not record.status.state.final:
        target.cancel(found.native_id)
        record.update(record.status, found.native_id)
    return True
