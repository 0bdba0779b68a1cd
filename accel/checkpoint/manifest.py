"""The manifest of a checkpoint: what it holds, and each file's length and digest. What it does not list is not read."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from accel.checkpoint.durable import BLOCK, Digest, block_checksum
from accel.checkpoint.file_names import (
    MANIFEST,
    OPTIMIZER,
    OUTLINE,
    OWN_NAMES,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    engine_name,
    numbered_name,
    random_states_name,
    rank_of_chunks,
)
from accel.checkpoint.files import write_bytes
from accel.errors import CheckpointError

SCHEMA = 3
_READERS = 4

# whole: in files of its own; sharded: in the chunks of all ranks; hook: saved by the script's hook; engine: in a folder
# by DeepSpeed or megatron-core.
Layout: TypeAlias = Literal["whole", "sharded", "hook", "engine"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    num_processes: the number of ranks that wrote it.
    save: an id that all copies of one save share.
    files: every file, by its path in the checkpoint. Those of a checkpoint without a manifest have no checksums.
    models, optimizers: the layout of each, in the order of `prepare`. Schema 2 has none for models in chunks.
    states_layouts: False if they are inferred from the names of files, which other programs number otherwise.
    """

    num_processes: int
    save: str | None = None
    files: Mapping[str, Digest] = field(default_factory=dict)
    models: Sequence[Layout] = ()
    optimizers: Sequence[Layout] = ()
    states_layouts: bool = True


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, the last file of a checkpoint, and flush it to the disk."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "num_processes": manifest.num_processes,
        "save": manifest.save,
        "models": manifest.models,
        "optimizers": manifest.optimizers,
        "files": {name: {"bytes": d.length, "crc32": d.crc32} for name, d in sorted(manifest.files.items())},
    }
    document["manifest_crc32"] = _manifest_checksum(document)
    write_bytes(folder / MANIFEST, json.dumps(document, indent=1).encode())


def _manifest_checksum(document: dict[str, Any]) -> str:
    content = {key: value for key, value in document.items() if key != "manifest_crc32"}
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest in ``folder``, or return None without one. Raises `CheckpointError` if it is damaged."""
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
        schema = document["schema"]
        if not 2 <= schema <= SCHEMA:
            writer = "a newer accel: update accel" if schema > SCHEMA else "an accel before 0.1, which can load it"
            raise CheckpointError(f"{path} has schema {schema}, by {writer}")
        if document["manifest_crc32"] != _manifest_checksum(document):
            raise ValueError("its checksum differs")
        files = {name: Digest(entry["bytes"], entry["crc32"]) for name, entry in document["files"].items()}
        layouts = document if schema > 2 else _layouts_by_name(files)
        return Manifest(
            num_processes=document["num_processes"],
            save=document.get("save"),
            files=files,
            models=layouts["models"],
            optimizers=layouts["optimizers"],
            states_layouts=schema > 2,
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def unverified(folder: Path) -> Manifest:
    """Describe a checkpoint by Accelerate, which has no manifest, by the names of its files; they have no checksums.

    Raises `CheckpointError` if there are files that only accel writes: it is an incomplete one of these.
    """
    engines = (*folder.glob(f"{engine_name(0)}/*"), *folder.glob(f"{engine_name(0)}_[0-9]*/*"))
    paths = (path for path in (*folder.iterdir(), *folder.glob("chunks/*/*"), *engines) if path.is_file())
    files = {str(path.relative_to(folder)): Digest(path.stat().st_size, "") for path in paths}
    own_name = next(filter(OWN_NAMES.fullmatch, files), None)
    if own_name is not None:
        raise CheckpointError(f"{folder} has no {MANIFEST}, but {own_name}, which only accel writes: it is incomplete")
    ranks = 0
    while random_states_name(ranks) in files:
        ranks += 1
    return Manifest(num_processes=ranks, files=files, states_layouts=False, **_layouts_by_name(files))


def _layouts_by_name(files: Collection[str]) -> dict[str, Any]:
    """Return the layouts of models and optimizers by the names of files, for checkpoints that do not state them."""

    def numbers(*names: str) -> range:
        number = 0
        while not {numbered_name(name, number) for name in names}.isdisjoint(files):
            number += 1
        return range(number)

    models = numbers(SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
    return {
        "models": ["whole" for _ in models],
        "optimizers": [
            "sharded" if numbered_name(OUTLINE, number) in files else "whole" for number in numbers(OUTLINE, OPTIMIZER)
        ],
    }


def find_damage(folder: Path) -> str | None:
    """Return the first problem of the checkpoint in ``folder`` in one line, or ``None`` if every file is intact."""
    return inspect(folder)[1] or find_changed_file(folder)


def inspect(folder: Path) -> tuple[Manifest | None, str | None]:
    """Return the manifest, and the first problem as `find_damage` does, but compare only the lengths of the files."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, str(error)
    if manifest is None:
        return None, f"{folder} has no {MANIFEST}"
    problems = (_difference(folder / name, digest) for name, digest in manifest.files.items())
    return manifest, next(filter(None, problems), None)


def _difference(path: Path, digest: Digest, block: int | None = None) -> str | None:
    """Return in one line how the length of a file, or a ``block`` of it, differs from what was written, or None."""
    try:
        length = path.stat().st_size
        if length != digest.length:
            return f"{path} has {length} bytes, but {digest.length} were written"
        if block is None or block_checksum(path, block) == digest.crc32[8 * block : 8 * block + 8]:
            return None
        return f"{path} has changed since it was written (its checksum differs)"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"


def find_changed_file(folder: Path, part: int = 0, parts: int = 1) -> str | None:
    """Return the first changed file in one line, or None. Blocks are read in parallel.

    If ``parts`` processes call this, each reads its own blocks; files of chunks are divided by the rank in their
    names.
    """
    manifest = read_manifest(folder)
    blocks = [
        (folder / name, digest, number)
        for name, digest in (manifest.files.items() if manifest else ())
        for number in range(-(-digest.length // BLOCK))
        if (number if (rank := rank_of_chunks(name)) is None else rank) % parts == part
    ]
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_difference, *block) for block in blocks]
        problem = next(filter(None, (future.result() for future in futures)), None)
        pool.shutdown(cancel_futures=True)  # one problem is enough: the other blocks are not read
    return problem
