"""The manifest of a checkpoint: every file with its length and digest. Where it holds true, the directory is whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from accel.checkpoint.files import Digest, digest_of, write_bytes
from accel.errors import CheckpointError

NAME = "accel_manifest.json"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of, and how many processes wrote it."""

    num_processes: int
    files: dict[str, Digest] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint, and push it to the disk."""
    document = {
        "schema": SCHEMA,
        "num_processes": manifest.num_processes,
        "files": {name: {"bytes": d.length, "sha256": d.sha256} for name, d in sorted(manifest.files.items())},
    }
    write_bytes(folder / NAME, json.dumps(document, indent=1).encode())


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest in ``folder``, ``None`` if there is none. Raises `CheckpointError` if it is damaged."""
    try:
        document = json.loads((folder / NAME).read_bytes())
        if document["schema"] > SCHEMA:
            raise CheckpointError(
                f"{folder / NAME} was written by a newer accel (schema {document['schema']}): update accel"
            )
        files = {name: Digest(entry["bytes"], entry["sha256"]) for name, entry in document["files"].items()}
        return Manifest(num_processes=document["num_processes"], files=files)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / NAME} is damaged: {error}") from error


def damage(folder: Path) -> str | None:
    """What is wrong with the checkpoint in ``folder``, in one line, or ``None`` if every file is as it was written."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    if manifest is None:
        return f"{folder} has no {NAME}"
    for name, digest in manifest.files.items():
        problem = _compare(folder / name, digest)
        if problem:
            return problem
    return None


def _compare(path: Path, digest: Digest) -> str | None:
    try:
        length = path.stat().st_size
        if length != digest.length:
            return f"{path} has {length} bytes where {digest.length} were written"
        return None if digest_of(path) == digest else f"{path} is not as it was written (SHA-256 differs)"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
