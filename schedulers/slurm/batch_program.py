"""The program that a batch script runs on a job's first node, for the job's directory."""

from __future__ import annotations

import functools

from ..hosts.bundle import pack

PROGRAM = "slurm/batch.py"


@functools.cache
def program() -> bytes:
    """Return a zip file, despite its name, that any Python from 3.8 on runs: `python -I batch.py DIRECTORY`."""
    return pack("schedulers.slurm.batch", "main(sys.argv[1:])")
