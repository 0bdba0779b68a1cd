"""Jobs whose submit was cut off, or cancelled before it had ended: found on their target, and ended there if asked.

A record that is `incomplete` says that the backend may have the job, or a part of it. Nothing here submits.
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
    """Records what the target knows of a job whose submit was cut off; does nothing while a process submits it.

    Whatever is not known is a warning on the record. Raises StoreError.
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
    """Looks for the job on its target and records its native id and state. One that somebody has cancelled is ended;
    the submit stays incomplete until the target has confirmed that.

    False when the target does not have it, or cannot tell. A cancelled job is over when the target still does not have
    it a minute later. To be called with the submission's lock held. Raises what asking the target raises, StoreError.
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
