"""``ACCEL_PROJECT_ROOT``: a directory of each node for the files of a run.

The platform copies it, file by file, to one place and back, as SageMaker does with ``/opt/ml/checkpoints``:
when the nodes start again, all of them have all files. So files of two nodes must not have the same name.
"""

from __future__ import annotations

import os
from pathlib import Path

from accel.errors import ArgumentError
from accel.world.environment import read_int

ROOT = "ACCEL_PROJECT_ROOT"


def root() -> Path | None:
    """Return the directory in ``ACCEL_PROJECT_ROOT``, if set. Raises `ArgumentError` for a relative one."""
    name = os.environ.get(ROOT)
    if not name:
        return None
    if not os.path.isabs(name):
        raise ArgumentError(f"environment variable {ROOT}={name!r} must be an absolute path")
    return Path(name).resolve()


def under_root(directory: str | None) -> str | None:
    """Return a directory of the project: a relative one is under ``ACCEL_PROJECT_ROOT``, if that is set."""
    above = root() if directory is not None else None
    return directory if above is None or directory is None else str(above / directory)


def own(place: Path) -> Path:
    """Return the path of this node's copy of ``place``.

    Under ``ACCEL_PROJECT_ROOT`` node 0 uses ``place``, and node N ``node-N``.
    """
    above = root()
    rank = read_int(os.environ, "GROUP_RANK", minimum=0)
    if above is None or not rank or not place.is_relative_to(above):
        return place
    return above / f"node-{rank}" / place.relative_to(above)
