"""Directories that are either whole or not there.

A checkpoint is made under a draft name beside its place and renamed when it is whole. A predecessor in that place is
moved aside first and deleted last, so that at every moment one whole checkpoint can be found: `recover` puts it in
its place.

    .NAME.draft-ID    being written, or whole (with a manifest) and about to be renamed
    .NAME.old-ID      the predecessor, moved aside
    .NAME.gone-ID     about to be deleted, never brought back
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
    """A new name of ``kind`` (draft, old, gone) for ``place``."""
    return place.parent / f".{place.name}.{kind}-{secrets.token_hex(4)}"


def leftovers(place: Path, kind: str) -> list[Path]:
    """What stands beside ``place`` under names of ``kind``."""
    pattern = re.compile(re.escape(f".{place.name}.{kind}-") + r"[0-9a-f]{8}")
    try:
        return sorted(entry for entry in place.parent.iterdir() if pattern.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def start_draft(place: Path) -> Path:
    """Make the directory in which a checkpoint for ``place`` is written.

    Drafts for it that were given up are deleted, and what a killed process was deleting beside it.
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
    """Put the whole checkpoint in ``draft`` in its place; what was there is replaced, the script's own files stay."""
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
    """Delete a predecessor, but first move to ``place`` what the script itself had put there."""
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
    """Delete a directory so that it is never seen half there."""
    aside = _ASIDE.fullmatch(folder.name)
    gone = beside(folder.parent / (aside[1] if aside else folder.name), "gone")
    os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def recover(place: Path) -> str | None:
    """Finish what a process that was killed in `publish` left open; returns what was done, in one line, if anything."""
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
    """Names in ``parent`` of which only a draft or predecessor is there."""
    if not parent.is_dir():
        return set()
    found = (_ASIDE.fullmatch(entry.name) for entry in parent.iterdir())
    return {match[1] for match in found if match and not os.path.lexists(parent / match[1])}


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """The directories ``prefix<number>`` in ``parent`` by rising number, interrupted ones put in their place."""
    for name in interrupted(parent):
        recover(parent / name)
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    if not parent.is_dir():
        return []
    found = ((pattern.fullmatch(entry.name), entry) for entry in parent.iterdir() if entry.is_dir())
    return sorted((int(match[1]), entry) for match, entry in found if match)


def delete_given_up(place: Path, prefix: str) -> None:
    """Delete what killed writers left beside ``place`` of checkpoints with lower numbers: nobody writes those again."""
    for entry in place.parent.iterdir():
        match = _ASIDE.fullmatch(entry.name)
        number = match[1].removeprefix(prefix) if match else ""
        if number.isdecimal() and int(number) < int(place.name.removeprefix(prefix)):
            remove(entry)
