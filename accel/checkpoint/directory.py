"""Atomically replaced checkpoint directories, and the manifest that verifies them: each file's length and digest.

A checkpoint is written under a draft name next to its final path and renamed when it is complete. A
predecessor in that path is renamed first and deleted last, so that one complete checkpoint exists at every
moment; `recover` moves it to the final path.

    .NAME.draft-ID    being written, or complete (with a manifest) and about to be renamed
    .NAME.old-ID      the predecessor, moved aside
    .NAME.gone-ID     about to be deleted, never restored
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.checkpoint.durable import BLOCK, Digest, block_checksum, fsync_directory
from accel.checkpoint.file_names import MANIFEST, rank_of_chunks
from accel.checkpoint.torch_files import write_bytes
from accel.errors import CheckpointError

# The manifest: a directory whose files match it is complete.

SCHEMA = 2
_READERS = 4


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, the number of its writers, and an id that all copies of one save share."""

    num_processes: int
    save: str | None = None
    files: dict[str, Digest] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint, and flush it to the disk."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "num_processes": manifest.num_processes,
        "save": manifest.save,
        "files": {name: {"bytes": d.length, "crc32": d.crc32} for name, d in sorted(manifest.files.items())},
    }
    document["manifest_crc32"] = _manifest_checksum(document)
    write_bytes(folder / MANIFEST, json.dumps(document, indent=1).encode())


def _manifest_checksum(document: dict[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "manifest_crc32"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest in ``folder``; None if there is none. Raises `CheckpointError` if it is damaged."""
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        if document["schema"] > SCHEMA:
            raise CheckpointError(
                f"{folder / MANIFEST} was written by a newer accel (schema {document['schema']}): update accel"
            )
        if document["schema"] < SCHEMA:
            raise CheckpointError(
                f"{folder / MANIFEST} was written by an older accel (schema {document['schema']}) and cannot be "
                "verified: delete that file to load the rest unverified"
            )
        if document["manifest_crc32"] != _manifest_checksum(document):
            raise ValueError("its checksum differs")
        files = {name: Digest(entry["bytes"], entry["crc32"]) for name, entry in document["files"].items()}
        return Manifest(num_processes=document["num_processes"], save=document.get("save"), files=files)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {error}") from error


def find_damage(folder: Path) -> str | None:
    """Return the first problem of the checkpoint in ``folder`` in one line, or ``None`` if every file is intact."""
    return find_size_mismatch(folder) or find_changed_file(folder)


def find_size_mismatch(folder: Path) -> str | None:
    """Do as `find_damage`, but compare only the lengths of the files."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    if manifest is None:
        return f"{folder} has no {MANIFEST}"
    problems = (_measure(folder / name, digest) for name, digest in manifest.files.items())
    return next(filter(None, problems), None)


def _measure(path: Path, digest: Digest) -> str | None:
    try:
        length = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if length == digest.length else f"{path} has {length} bytes, but {digest.length} were written"


def find_changed_file(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return the first changed file in one line, or None. Blocks are read in parallel.

    If ``parts`` processes call this, each reads its own blocks; files of chunks are divided by the rank in their
    names.
    """
    manifest = read_manifest(folder)
    blocks = [
        (folder / name, number, digest.crc32[8 * number : 8 * number + 8])
        for name, digest in (manifest.files.items() if manifest else ())
        for number in range(-(-digest.length // BLOCK))
        if (number if (rank := rank_of_chunks(name)) is None else rank) % parts == part
    ]
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_compare, *block) for block in blocks]
        problem = next(filter(None, (future.result() for future in futures)), None)
        pool.shutdown(cancel_futures=True)  # one problem is enough: the other blocks are not read
    return problem


def _compare(path: Path, number: int, expected: str) -> str | None:
    try:
        checksum = block_checksum(path, number)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None if checksum == expected else f"{path} has changed since it was written (its checksum differs)"


# The directory.

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
