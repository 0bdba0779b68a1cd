"""Directories of checkpoints, each complete at every moment, or completed by the next process that looks for it.

A checkpoint is written as a draft, which is whole once it has its manifest. The draft of a directory that does not
exist lies next to it and is renamed. A directory that exists stays, with the script's own files: the draft lies in it.
First the old manifest goes, then the draft's files are moved into place, its manifest last.

    .NAME.draft-ID    the draft of NAME, which does not exist
    NAME/.draft-ID    the draft of NAME; while its files are moved, ``.replaced`` in it has the old manifest
    .NAME.gone-ID     about to be deleted, never restored

A writer locks a file in its draft. A draft whose lock is free was given up, as is every draft on a file system without
locks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from accel.checkpoint.durable import digest_of, fsync
from accel.checkpoint.file_names import LOCK, MANIFEST
from accel.checkpoint.manifest import Manifest, read_manifest
from accel.errors import CheckpointError

_REPLACED = ".replaced"
_ID = "[0-9a-f]{8}"


def _entries(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if re.fullmatch(pattern, entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def drafts(final: Path) -> list[Path]:
    """Return the drafts of ``final``, next to it and in it."""
    return [
        *_entries(final.parent, rf"\.{re.escape(final.name)}\.draft-{_ID}"),
        *_entries(final, rf"\.draft-{_ID}"),
    ]


def start_draft(final: Path) -> tuple[Path, IO[str] | None]:
    """Create the directory in which a checkpoint for ``final`` is written; return it and its lock.

    Deletes drafts that were given up, and directories in the same parent that a killed process was deleting. Raises
    `CheckpointError` if the file system cannot rename.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    recover(final)
    for draft in drafts(final):
        discard(draft, final)
    for trash in _entries(final.parent, rf"\..+\.gone-{_ID}"):
        shutil.rmtree(trash, ignore_errors=True)
    first, draft = _new_draft(final), _new_draft(final)
    first.mkdir()
    (first / LOCK).touch()
    try:
        os.rename(first, draft)
    except OSError as error:
        shutil.rmtree(first, ignore_errors=True)
        raise CheckpointError(
            f"the file system of {final.parent} cannot rename ({error.strerror}): save on another, and copy from there"
        ) from error
    return draft, _lock(draft)


def _new_draft(final: Path) -> Path:
    name = f".draft-{secrets.token_hex(4)}"
    return final / name if os.path.lexists(final) else final.with_name(f".{final.name}{name}")


def _lock(draft: Path) -> IO[str] | None:
    """Lock ``draft`` until the file that is returned is closed; return None if another process has locked it.

    The lock is the process's (``lockf``): with ``flock`` a forked process, such as a loader's worker, would keep it.
    """
    file = open(draft / LOCK, "a")  # noqa: SIM115 (the caller closes it)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            return None
    return file


def discard(draft: Path, final: Path) -> None:
    """Delete ``draft`` unless another process writes it, or ``final`` is incomplete without its files."""
    if (draft / _REPLACED).exists() and not (final / MANIFEST).exists():
        return
    with suppress(OSError):
        lock = _lock(draft)
        if lock is not None:
            lock.close()  # NFS keeps open files
            shutil.rmtree(draft, ignore_errors=True)


def publish(draft: Path, final: Path, lock: IO[str] | None) -> None:
    """Make the whole ``draft`` the checkpoint in ``final``, and close its lock; the script's own files stay."""
    fsync(draft)
    if os.path.lexists(final):
        _move_into_place(draft, final)
    else:
        os.rename(draft, final)
        fsync(final.parent)
    if lock is not None:
        lock.close()
    (final / LOCK).unlink(missing_ok=True)
    shutil.rmtree(draft, ignore_errors=True)


def _move_into_place(draft: Path, final: Path) -> None:
    """Replace the checkpoint in ``final``. After any interruption it can be called again."""
    manifest, replaced = read_manifest(draft), draft / _REPLACED
    assert manifest is not None
    folder = next((final / name for name in manifest.files if (final / name).is_dir()), None)
    if folder is not None:
        raise CheckpointError(f"{folder} is a directory, but the checkpoint has a file of that name")
    for name in manifest.files:
        (final / name).parent.mkdir(parents=True, exist_ok=True)
    replaced.mkdir(exist_ok=True)
    if (final / MANIFEST).exists():
        os.rename(final / MANIFEST, replaced / MANIFEST)
    for name in manifest.files:
        if (draft / name).exists():
            os.rename(draft / name, final / name)
    for name in _listed(replaced) - manifest.files.keys():
        (final / name).unlink(missing_ok=True)
        with suppress(OSError):
            os.removedirs((final / name).parent)
    fsync_folders(final, manifest.files)
    os.rename(draft / MANIFEST, final / MANIFEST)
    fsync(final)


def fsync_folders(root: Path, names: Iterable[str]) -> None:
    """Flush the entries of ``root``, and of the folders in it that hold the files ``names``."""
    parents = {parent for name in names for parent in (root / name).parents}
    for folder in {root} | {parent for parent in parents if root in parent.parents}:
        fsync(folder)


def _listed(folder: Path) -> set[str]:
    """Return the names in a manifest, if it can be read, that lie in the checkpoint's directory."""
    with suppress(CheckpointError):
        names = (read_manifest(folder) or Manifest(num_processes=0)).files
        return {name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts}
    return set()


def recover(final: Path) -> str | None:
    """Finish what a killed writer left of publishing ``final``; return one line about it if there was something."""
    for draft in drafts(final):
        older = draft.parent != final and (final / MANIFEST).exists()
        with suppress(OSError, CheckpointError):
            if (draft / MANIFEST).exists() and not older and (lock := _lock(draft)) is not None:
                with lock:
                    if _is_whole(draft, final):
                        publish(draft, final, lock)
                        return f"{final} was being replaced when its writer was killed: restored {draft.name}"
    return None


def _is_whole(draft: Path, final: Path) -> bool:
    """Return True if every file is intact, in the draft or moved into place already."""
    manifest = read_manifest(draft)
    return manifest is not None and all(
        digest_of(draft / name if (draft / name).exists() else final / name) == digest
        for name, digest in manifest.files.items()
    )


def is_half_replaced(final: Path) -> bool:
    """Return True if ``final`` has files of two checkpoints, because publishing was interrupted."""
    return not (final / MANIFEST).exists() and any((draft / _REPLACED).exists() for draft in drafts(final))


def remove(folder: Path) -> None:
    """Delete a checkpoint so that no reader ever loads it half deleted."""
    trash = folder.with_name(f".{folder.name}.gone-{secrets.token_hex(4)}")
    try:
        os.rename(folder, trash)
    except OSError:  # in an image's layer, or a mount point
        trash = folder
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(trash, ignore_errors=True)


def numbered(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the directories ``prefix<number>`` in ``parent``, sorted, after recovering interrupted ones."""
    pattern = rf"{re.escape(prefix)}\d+"
    for name in {entry.name for entry in _entries(parent, rf"({pattern}|\.{pattern}\.draft-{_ID})")}:
        recover(parent / name.removeprefix(".").partition(".")[0])
    return listed(parent, prefix)


def listed(parent: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return the directories ``prefix<number>`` in ``parent``, sorted."""
    folders = [entry for entry in _entries(parent, rf"{re.escape(prefix)}\d+") if entry.is_dir()]
    return sorted((int(folder.name.removeprefix(prefix)), folder) for folder in folders)


def delete_abandoned(final: Path, prefix: str) -> None:
    """Delete drafts of checkpoints with lower numbers, which are never written again."""
    for entry in _entries(final.parent, rf"\.{re.escape(prefix)}\d+\.draft-{_ID}"):
        if int(entry.name.split(".")[1].removeprefix(prefix)) < int(final.name.removeprefix(prefix)):
            discard(entry, final)
