"""Whether this process may still write what later starts of its job read.

A scheduler that has lost sight of a node starts a job again elsewhere while its first processes may still run there.
Such a process must not put its checkpoint in the place of one that the new start has written.
"""

from __future__ import annotations

import os
from pathlib import Path

from accel.errors import CheckpointError

FENCE, ATTEMPT = "ACCEL_FENCE", "ACCEL_ATTEMPT"


def check() -> None:
    """Raise `CheckpointError` once a later start of this job has begun; nothing where no scheduler has set a fence.

    ``ACCEL_FENCE`` names a file that holds the number of the newest start, ``ACCEL_ATTEMPT`` is that of this one. A
    file that is gone bars nobody; one that cannot be read raises `OSError`.
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
