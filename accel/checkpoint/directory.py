"""Atomically replaced checkpoint directories.

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
from accel.checkpoint.file_names import MANIFEST
from accel.checkpoint.manifest import find_damage, read_manifest
from accel.errors import CheckpointError

_DELETED = re.compile(r"\..+\.gone-[0-9a-f]{8}")
_ASIDE = re.compile(r"\.(.+)\.(?:draft|old)-[0-9a-f]{8}")


def sibling_path(final: Path, kind: str) -> Path:
    """Return a new name of ``kind`` (draft, old, gone) for ``final``."""
    return final.parent / f".{final.name}.{kind}-{secrets.token_hex(4)}"


def leftovers(final: Path, kind: str) -> list[Path]:
    """Return the directories next to ``final`` with names of ``kind``."""
    pattern = re.compile(re.escape(f".{final.name}.{kind}-") + r"[0-9a-f]{8}")
    try:
        return sorted(entry for entry in final.parent.iterdir() if pattern.fullmatch(entry.name))
    except FileNotFoundError:
        return []


def start_draft(final: Path) -> Path:
    """Create the directory in which a checkpoint for ``final`` is written.

    Deletes its abandoned drafts, and directories in the same parent that a killed process was deleting.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    recover(final)
    deleted = [entry for entry in final.parent.iterdir() if _DELETED.fullmatch(entry.name)]
    for stale in leftovers(final, "draft") + deleted:
        shutil.rmtree(stale, ignore_errors=True)
    draft = sibling_path(final, "draft")
    draft.mkdir()
    return draft


def publish(draft: Path, final: Path) -> None:
    """Move the complete checkpoint in ``draft`` to ``final``, replacing an older one; the script's own files stay."""
    fsync_directory(draft)
    predecessor = None
    if os.path.lexists(final):
        predecessor = sibling_path(final, "old")
        os.rename(final, predecessor)
    os.rename(draft, final)
    fsync_directory(final.parent)
    if predecessor is not None:
        _retire(predecessor, final)


def _retire(predecessor: Path, final: Path) -> None:
    """Delete a predecessor, after moving the script's own files in it to ``final``."""
    try:
        manifest = read_manifest(predecessor)
    except CheckpointError:
        manifest = None
    own_names = {MANIFEST, *(manifest.files if manifest else ())}
    top_names = {name.split("/")[0] for name in own_names}
    for entry in predecessor.iterdir():
        if entry.name not in top_names and not os.path.lexists(final / entry.name):
            os.rename(entry, final / entry.name)
    remove(predecessor)


def remove(folder: Path) -> None:
    """Delete a directory so that no reader ever sees it half deleted: it is renamed first."""
    match = _ASIDE.fullmatch(folder.name)
    trash = sibling_path(folder.parent / (match[1] if match else folder.name), "gone")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def recover(final: Path) -> str | None:
    """Finish a `publish` that was killed; return one line about it if a checkpoint was moved to ``final``."""
    if os.path.lexists(final):
        for predecessor in leftovers(final, "old"):
            _retire(predecessor, final)
        return None
    for kind in ("draft", "old"):
        for candidate in leftovers(final, kind):
            if find_damage(candidate) is None:
                os.rename(candidate, final)
                fsync_directory(final.parent)
                return f"{final} was being replaced when its writer was killed: restored {candidate.name}"
    return None


def interrupted(parent: Path) -> set[str]:
    """Return the names in ``parent`` that exist only as a draft or predecessor."""
    if not parent.is_dir():
        return set()
    matches = (_ASIDE.fullmatch(entry.name) for entry in parent.iterdir())
    return {match[1] for match in matches if match and not os.path.lexists(parent / match[1])}


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the directories ``prefix<number>`` in ``parent``, sorted, after recovering interrupted ones."""
    for name in interrupted(parent):
        recover(parent / name)
    pattern = re.compile(re.escape(prefix) + r"(\d+)")
    if not parent.is_dir():
        return []
    matches = ((pattern.fullmatch(entry.name), entry) for entry in parent.iterdir() if entry.is_dir())
    return sorted((int(match[1]), entry) for match, entry in matches if match)


def delete_abandoned(final: Path, prefix: str) -> None:
    """Delete drafts and predecessors of checkpoints with lower numbers, which are never written again."""
    for entry in final.parent.iterdir():
        match = _ASIDE.fullmatch(entry.name)
        number = match[1].removeprefix(prefix) if match else ""
        if number.isdecimal() and int(number) < int(final.name.removeprefix(prefix)):
            remove(entry)
