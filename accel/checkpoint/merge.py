"""Merging of sharded checkpoints, ours and those of `torch.distributed.checkpoint`, into one file of weights."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from accel.checkpoint.chunks import Chunks
from accel.checkpoint.dcp import DcpFolder
from accel.checkpoint.durable import reporting_full_disk
from accel.checkpoint.file_names import MANIFEST, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel.checkpoint.files import refuse_unsavable
from accel.checkpoint.manifest import Manifest, find_damage, read_manifest
from accel.checkpoint.weights import save_weights
from accel.errors import CheckpointError


def merge_fsdp_weights(
    checkpoint_dir: str | Path,
    output_path: str | Path,
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Merge ``checkpoint_dir`` into ``output_path``/model.safetensors or pytorch_model.bin, and return that path.

    Only tensors are read: no code in the checkpoint runs. The file is written atomically, as by `save_weights`, and the
    checkpoint is removed only afterwards. The weights are held in memory once. A checkpoint by
    `Accelerator.save_state` is never removed, as it holds more than weights, and only its first model is read. Raises
    `CheckpointError`, with nothing written.
    """
    source, folder = Path(checkpoint_dir), Path(output_path)
    manifest = read_manifest(source)
    if manifest is None and (source / "chunks").is_dir():
        raise CheckpointError(f"{source} has no {MANIFEST}")
    if remove_checkpoint_dir and manifest is not None:
        raise CheckpointError(f"--remove_checkpoint_dir: {source} holds more than weights and is not removed")
    if remove_checkpoint_dir and folder.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"--remove_checkpoint_dir would also remove {folder}: write outside {source}")
    state = _read_dcp(source) if manifest is None else _read_chunks(source, manifest)
    if safe_serialization:
        refuse_unsavable(state, str(source), ": use --unsafe_serialization")
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file: pass a directory for the merged weights")
    with reporting_full_disk():
        save_weights(state, folder, sys.maxsize, safe_serialization, both=True)
    if remove_checkpoint_dir:
        shutil.rmtree(source)
    return folder / (SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME)


def _read_chunks(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    problem = find_damage(folder)
    if problem is not None:
        raise CheckpointError(problem)
    state = Chunks.in_folder(folder, manifest.files).gathered("model.0.")
    if not state:
        raise CheckpointError(f"{folder} holds no weights in chunks")
    return state


def _read_dcp(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, in full, by name; a first key common to all names, as in ``{"model": {…}}``, is dropped."""
    saved = DcpFolder(folder)
    state = saved.tensors.gathered("")
    if not state:
        raise CheckpointError(f"{folder} holds no tensors")
    key_paths = [saved.paths[name] for name in state]
    if len({key_path[0] for key_path in key_paths}) > 1 or any(len(key_path) < 2 for key_path in key_paths):
        return state
    names = [".".join(str(step) for step in key_path[1:]) for key_path in key_paths]
    return dict(zip(names, state.values(), strict=True))
