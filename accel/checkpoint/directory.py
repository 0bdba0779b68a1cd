"""Atomic replacement of directories.

A checkpoint is written under a draft name next to its final path and renamed when it is complete. A
predecessor in that path is renamed first and deleted last, so that one complete checkpoint exists at every
moment; `recover` moves it to the final path.

    .NAME.draft-ID    being written, or complete (with a manifest) and about to be renamed
    .NAME.old-ID      the predecessor, moved aside
    .NAME.gone-ID     about to be deleted, never restored
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from accel.checkpoint.durable import fsync_directory
from accel.checkpoint.manifest import NAME, damage, read_manifest
from accel.errors import CheckpointError

_GONE = re.compile(r"\..+\.gone-[0-9a-f]{8}")
_ASIDE = re.compile(r"\.(.+)\.(?:draft|old)-[0-9a-f]{8}")


def beside(place: Path, kind: str) -> Path:
    """Return a new name of ``kind`` (draft, old, gone) for ``place``."""
    return place.parent / f".{place.name}.{kind}-{secrets.token_hex(4)}"


def leftovers(place: Path, kind: str) -> list[Path]:
    """Return the directories next to ``place`` with names of ``kind``."""
    pattern = re.compile(re.escape(f".{place.name}.{kind}-") + r"[0-9a-f]{8}")
    try:
        return sorted(entry for entry in place.parent.iterdir() if pattern.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def start_draft(place: Path) -> Path:
    """Create the directory in which a checkpoint for ``place`` is written.

    Deletes its abandoned drafts, and directories in the same parent that a killed process was deleting.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    recover(place)
    gone = [entry for entry in place.parent.iterdir() if _GONE.fullmatch(entry.name)]
    for stale in leftovers(place, "draft") + gone:
        shutil.rmtree(stale, ignore_errors=True)
    draft = beside(place, "draft")
    draft.mkdir()
    return draft


def publish(draft: Path, place: Path) -> None:
    """Move the complete checkpoint in ``draft`` to ``place``, replacing an older one; the script's own files stay."""
    fsync_directory(draft)
    aside = None
    if os.path.lexists(place):
        aside = beside(place, "old")
        os.rename(place, aside)
    os.rename(draft, place)
    fsync_directory(place.parent)
    if aside is not None:
        _retire(aside, place)


def _retire(aside: Path, place: Path) -> None:
    """Delete a predecessor, after moving the script's own files in it to ``place``."""
    try:
        manifest = read_manifest(aside)
    except CheckpointError:
        manifest = None
    ours = {NAME, *(manifest.files if manifest else ())}
    tops = {name.split("/")[0] for name in ours}
    for entry in aside.iterdir():
        if entry.name not in tops and not os.path.lexists(place / entry.name):
            os.rename(entry, place / entry.name)
    remove(aside)


def remove(folder: Path) -> None:
    """Delete a directory so that no reader ever sees it half deleted: it is renamed first."""
    aside = _ASIDE.fullmatch(folder.name)
    gone = beside(folder.parent / (aside[1] if aside else folder.name), "gone")
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def recover(place: Path) -> str | None:
    """Finish a `publish` that was killed; return one line about it if a checkpoint was moved to ``place``."""
    if os.path.lexists(place):
        for aside in leftovers(place, "old"):
            _retire(aside, place)
        return None
    for kind in ("draft", "old"):
        for candidate in leftovers(place, kind):
            if damage(candidate) is None:
                os.rename(candidate, place)
                fsync_directory(place.parent)
                return f"{place} was being replaced when its writer was killed: went on with {candidate.name}"
    return None


def interrupted(parent: Path) -> set[str]:
    """Return the names in ``parent`` that exist only as a draft or predecessor."""
    if not parent.is_dir():
        return set()
    found = (_ASIDE.fullmatch(entry.name) for entry in parent.iterdir())
    return {match[1] for match in found if match and not os.path.lexists(parent / match[1])}


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the directories ``prefix<number>`` in ``parent`` by rising number, after recovering interrupted ones."""
    for name in interrupted(parent):
        recover(parent / name)
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    if not parent.is_dir():
        return []
    found = ((pattern.fullmatch(entry.name), entry) for entry in parent.iterdir() if entry.is_dir())
    return sorted((int(match[1]), entry) for match, entry in found if match)


def delete_given_up(place: Path, prefix: str) -> None:
    """Delete drafts and predecessors of checkpoints with lower numbers: nobody writes those again."""
    for entry in place.parent.iterdir():
        match = _ASIDE.fullmatch(entry.name)
        number = match[1].removeprefix(prefix) if match else ""
        if number.isdecimal() and int(number) < int(place.name.removeprefix(prefix)):
            remove(entry)
