"""Merging of sharded checkpoints, ours and those of `torch.distributed.checkpoint`, into one file of weights."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.chunks import Chunks
from accel.checkpoint.dcp import METADATA, DcpFolder
from accel.checkpoint.durable import fsync_directory, reporting_full_disk
from accel.checkpoint.file_names import CHUNKS, MANIFEST, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel.checkpoint.manifest import find_damage
from accel.checkpoint.tensors import why_unsavable, write_tensors
from accel.checkpoint.torch_files import replacing, write_object
from accel.errors import CheckpointError


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Merge ``checkpoint_dir`` into ``output_path``/model.safetensors or pytorch_model.bin, and return that path.

    Only tensors are read: no code in the checkpoint runs. The file is written atomically, and the checkpoint is
    removed only afterwards. The weights are held in memory once. A checkpoint by `Accelerator.save_state` is never
    removed, as it holds more than weights, and only its first model is read. Raises `CheckpointError`, with
    nothing written.
    """
    source, folder = Path(checkpoint_dir), Path(output_path)
    _check(source, folder, remove=remove_checkpoint_dir)
    state = _read_chunks(source) if _has_chunks(source) else read_sharded(source)
    if safe_serialization:
        _check_types(source, state)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise CheckpointError(f"{folder} is a file: pass a directory for the merged weights") from None
    path = folder / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)
    with reporting_full_disk(), replacing(path) as draft:
        if safe_serialization:
            write_tensors(draft, state)
        else:
            write_object(draft, state)
    fsync_directory(folder)
    if remove_checkpoint_dir:
        shutil.rmtree(source)
    return path


def _has_chunks(folder: Path) -> bool:
    return next(folder.glob(CHUNKS), None) is not None


def _read_chunks(folder: Path) -> dict[str, torch.Tensor]:
    problem = find_damage(folder) if (folder / MANIFEST).exists() else None
    if problem is not None:
        raise CheckpointError(problem)
    state = Chunks.in_folder(folder).gathered("model.0.")
    if not state:
        raise CheckpointError(f"{folder} holds no weights in chunks")
    return state


def read_sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a sharded checkpoint, in full, by name; a single enclosing key is dropped.

    Raises `CheckpointError`.
    """
    saved = DcpFolder(folder)
    state = saved.tensors.gathered("")
    if not state:
        raise CheckpointError(f"{folder} holds no tensors")
    return _unwrapped(state, saved.paths)


def _unwrapped(state: Mapping[str, torch.Tensor], paths: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Remove a first key common to all names, as in ``{"model": {…}}``: no loader expects it."""
    key_paths = [paths[name] for name in state]
    if len({key_path[0] for key_path in key_paths}) > 1 or any(len(key_path) < 2 for key_path in key_paths):
        return dict(state)
    return {
        ".".join(str(step) for step in key_path[1:]): state[name]
        for name, key_path in zip(state, key_paths, strict=True)
    }


def _check(source: Path, folder: Path, *, remove: bool) -> None:
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such directory")
    if _has_chunks(source):
        if remove:
            raise CheckpointError(f"--remove_checkpoint_dir: {source} holds more than weights and is not removed")
        return
    if not (source / METADATA).is_file():
        parts = sorted(path.parent.name for path in source.glob(f"*/{METADATA}"))
        hint = f". Pass one of its subdirectories: {', '.join(parts)}" if parts else ""
        raise CheckpointError(f"{source} is not a sharded checkpoint: it has no {METADATA}{hint}")
    if remove and folder.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"--remove_checkpoint_dir would also remove {folder}: write outside {source}")


def _check_types(source: Path, state: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        problem = why_unsavable(tensor)
        if problem is not None:
            raise CheckpointError(
                f"{source}: {name} is {problem}, which safetensors cannot hold: use --unsafe_serialization"
            )
