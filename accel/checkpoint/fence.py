"""A guard against writes by processes of an earlier start of the job.

A scheduler that loses a node starts the job again elsewhere while its first processes may still run there.
Such a process must not replace a checkpoint that the new start has written.
"""

from __future__ import annotations

import os
from pathlib import Path

from accel.errors import CheckpointError

FENCE, ATTEMPT = "ACCEL_FENCE", "ACCEL_ATTEMPT"


def check() -> None:
    """Raise `CheckpointError` if a later start of this job has begun. Without a scheduler's fence nothing happens.

    ``ACCEL_FENCE`` names a file with the number of the newest start, ``ACCEL_ATTEMPT`` is that of this one. A
    missing file blocks nobody; an unreadable one raises `OSError`.
    """
    name = os.environ.get(FENCE)
    if not name:
        return
    try:
        newest = Path(name).read_text().strip()
    except FileNotFoundError:
        return
    own = os.environ.get(ATTEMPT, "0")
    if newest.isdigit() and own.isdigit() and int(newest) > int(own):
        raise CheckpointError(
            f"start {newest} of this job has begun ({name}), and this process belongs to start {own}: "
            "it leaves the checkpoints alone"
        )
