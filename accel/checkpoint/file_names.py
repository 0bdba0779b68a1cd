"""The names of files in a checkpoint: Accelerate's and our own."""

from __future__ import annotations

import re

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
CUSTOM_NAME = "custom_checkpoint"

WEIGHTS_NAME = "pytorch_model.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = "pytorch_model.bin.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"

EXTRA = "model_extra.bin"
OPTIMIZER = f"{OPTIMIZER_NAME}.bin"
OUTLINE = f"{OPTIMIZER_NAME}_outline.bin"
SCHEDULER = f"{SCHEDULER_NAME}.bin"
SAMPLER = f"{SAMPLER_NAME}.bin"
MANIFEST = "accel_manifest.json"
LOCK = ".accel_lock"
CHECKPOINT_PREFIX = "checkpoint_"
# The names that Accelerate does not write.
OWN_NAMES = re.compile(
    r"chunks/.*|optimizer_outline(_\d+)?\.bin|model_extra(_\d+)?\.bin|gradients_\d+\.(bin|safetensors)"
)
# Of registered objects, schedulers and loaders; in the order of the names, the registered ones come first.
OBJECT_NAMES = re.compile(rf"{CUSTOM_NAME}_\d+\.pkl|({SCHEDULER_NAME}|{SAMPLER_NAME})(_\d+)?\.bin")
_CHUNKS = re.compile(r"chunks/node_\d+/rank_(\d+)\.safetensors")


def numbered_name(name: str, index: int) -> str:
    """Return the file name of part ``index``: ``model.safetensors``, ``model_1.safetensors``, and so on."""
    if index == 0:
        return name
    stem, suffix = name.split(".", 1)
    return f"{stem}_{index}.{suffix}"


def engine_name(index: int) -> str:
    """Return the name of DeepSpeed's folder for model ``index``, as Accelerate's."""
    return f"{MODEL_NAME}_{index}" if index else MODEL_NAME


def custom_name(index: int) -> str:
    """Return the file name of the ``index``-th object of ``register_for_checkpointing``."""
    return f"{CUSTOM_NAME}_{index}.pkl"


def gradients_name(process_index: int, suffix: str = "bin") -> str:
    """Return the file name of a process's gradients in an open accumulation window; older ones are safetensors."""
    return f"gradients_{process_index}.{suffix}"


def random_states_name(process_index: int) -> str:
    """Return the file name of a process's random states."""
    return f"{RNG_STATE_NAME}_{process_index}.pkl"


def chunks_name(node: int, process_index: int) -> str:
    """Return the file name of a process's chunks of sharded tensors."""
    return f"chunks/node_{node}/rank_{process_index}.safetensors"


def rank_of_chunks(name: str) -> int | None:
    """Return the rank that wrote a file of chunks; None for any other name."""
    match = _CHUNKS.fullmatch(name)
    return int(match[1]) if match else None


def shard_name(pattern: str, number: int, total: int) -> str:
    """Return ``model-00001-of-00002.safetensors`` for ``model{suffix}.safetensors``; the plain name for one shard."""
    return pattern.format(suffix="" if total == 1 else f"-{number:05d}-of-{total:05d}")
