"""Checkpoints on nodes without a shared file system: each node keeps a full copy.

Any file of a copy may be missing or from an earlier save, because the program that copies it to the next
start of the nodes works file by file (see `accel.world.project_root`) and may be interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.checkpoint.manifest import misfit, read_manifest
from accel.errors import CheckpointError
from accel.world.project_root import own


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A node's copy of a checkpoint: the id of its save, and its problem if there is one."""

    folder: str
    save: str | None = None
    problem: str | None = None


def copy_in(place: Path, num_processes: int) -> Copy:
    """Return this node's copy of the checkpoint in ``place``, checked only by file lengths.

    If another number of processes wrote the checkpoint, a new node has no copy: it uses that of node 0.
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
