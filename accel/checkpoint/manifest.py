"""The manifest of a checkpoint: each file's length and digest. A directory whose files match it is complete."""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accel.checkpoint.durable import BLOCK, Digest, block_checksum
from accel.checkpoint.file_names import MANIFEST, rank_of_chunks
from accel.checkpoint.torch_files import write_bytes
from accel.errors import CheckpointError

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
