"""Checkpoints on nodes that have no file system in common: each node keeps a whole copy.

Any file of a copy may be missing, or be of an earlier save: what copies it to the next start of the nodes goes file by
file (see `accel.world.project_root`), and may be cut off.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.checkpoint.manifest import misfit, read_manifest
from accel.errors import CheckpointError
from accel.world.project_root import own


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A node's copy of a checkpoint: of which save it is, and what is wrong with it."""

    folder: str
    save: str | None = None
    problem: str | None = None


def copy_in(place: Path, num_processes: int) -> Copy:
    """This node's copy of the checkpoint in ``place``, of which no file has been read yet.

    Of a checkpoint by another number of processes a new node has no copy of its own: it takes that of node 0.
    """
    folder = own(place)
    if not folder.is_dir() and folder != place and _written_by(place) not in (None, num_processes):
        folder = place
    problem = misfit(folder) if folder.is_dir() else f"{folder} is not there"
    manifest = None if problem else read_manifest(folder)
    return Copy(folder=str(folder), save=manifest.save if manifest else None, problem=problem)


def _written_by(folder: Path) -> int | None:
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return None
    return manifest.num_processes if manifest else None
