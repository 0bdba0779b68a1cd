"""Files of a model's weights: one file or shards with an index, as safetensors or by `torch.save`."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.durable import fsync, reporting_full_disk
from accel.checkpoint.file_names import (
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
    numbered_name,
    shard_name,
)
from accel.checkpoint.files import (
    file_order,
    identity,
    numpy_types,
    refuse_unsavable,
    replacing,
    untie,
    write_bytes,
    write_object,
    write_tensors,
)
from accel.errors import ArgumentError, CheckpointError
from accel.parallel.shares import full_tensor
from accel.state import PartialState
from accel.tensor_files import SafetensorsFile, StoredTensor, read_all, read_index, read_object

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size_in_bytes(size: int | str) -> int:
    """Parse ``"10GB"`` (10¹⁰), ``"5MiB"`` (5 × 2²⁰) or a number of bytes. Raises `ArgumentError` for anything else."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise ArgumentError(f"max_shard_size={size!r}: use a number of bytes, or digits and a unit such as '5GB'")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].upper()])


def shards(state: Mapping[str, Any], max_bytes: int) -> list[dict[str, Any]]:
    """Split ``state``, in its order, into parts of at most ``max_bytes`` bytes; a larger tensor gets a part of its own.

    Names that share memory (tied weights) are in one part.
    """
    parts: list[dict[str, Any]] = [{}]
    filled = 0
    part_by_memory: dict[Any, dict[str, Any]] = {}
    for name, value in state.items():
        memory = identity(value) if isinstance(value, torch.Tensor) and value.numel() else name
        size = _bytes_of(value)
        if memory not in part_by_memory:
            if parts[-1] and filled + size > max_bytes:
                parts.append({})
                filled = 0
            filled += size
        part_by_memory.setdefault(memory, parts[-1])[name] = value
    return parts


def _bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with tied weights under their first name only, and its tensors contiguous.

    Logs a warning with the names that are dropped.
    """
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    _, aliases = untie(tensors)
    if aliases:
        names = ", ".join(sorted(aliases))
        logging.getLogger(__name__).warning("tied weights are saved under their first name only, without: %s", names)
    return {
        name: value.contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in state_dict.items()
        if name not in aliases
    }


def save_weights(
    state: Mapping[str, Any], folder: Path, max_size: int | str, safe: bool, writes: bool = True, both: bool = False
) -> None:
    """Write ``state`` into ``folder``, in files of at most ``max_size``.

    A reader finds the earlier weights, these, or none: all files are written as drafts. Before they are moved into
    place, an earlier index is deleted and, if shards follow, an earlier single file; the new index is last. Then the
    rest of the earlier weights is deleted. After pickles that includes safetensors, which readers prefer, unless
    ``both`` are to be there.

    Sharded tensors are gathered one at a time, for safetensors: all processes must call it, and those that do not
    write (``writes``) take part in gathering even if the writer fails. Raises `ArgumentError` for values that
    safetensors cannot hold, and for a ``folder`` that is a file.
    """
    parts = shards(state, size_in_bytes(max_size))
    gathered: Iterator[torch.Tensor] = iter(())
    if safe:
        refuse_unsavable(state, "save_model", ": use safe_serialization=False", ArgumentError)
        gathered = map(full_tensor, [value for part in parts for value in file_order(untie(part)[0]).values()])
    try:
        if folder.is_file():
            raise ArgumentError(f"save_model: {folder} must be a directory, but is a file")
        if writes:
            _write_parts(parts, folder, safe, gathered)
            if not safe and not both:
                _delete(folder, _files(SAFE_WEIGHTS_PATTERN_NAME))
                fsync(folder)
    finally:
        deque(gathered, maxlen=0)


def _write_parts(parts: Sequence[dict[str, Any]], folder: Path, safe: bool, gathered: Iterator[torch.Tensor]) -> None:
    pattern = SAFE_WEIGHTS_PATTERN_NAME if safe else WEIGHTS_PATTERN_NAME
    single = pattern.format(suffix="")
    index_name = f"{single}.index.json"
    names = [shard_name(pattern, number, len(parts)) for number in range(1, len(parts) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    _delete(folder, rf"\.{_files(pattern)}\.draft")  # a killed writer's
    with ExitStack() as moves:  # the last entered is moved into place first
        if len(parts) > 1:
            in_index = [untie(part)[0] if safe else part for part in parts]
            total = sum(_bytes_of(value) for part in in_index for value in part.values())
            weight_map = {key: name for name, part in zip(names, in_index, strict=True) for key in part}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            draft = moves.enter_context(replacing(folder / index_name))
            write_bytes(draft, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
            moves.callback(fsync, folder)
        for name, part in zip(names, parts, strict=True):
            draft = moves.enter_context(replacing(folder / name))
            if safe:
                write_tensors(draft, part, fetch=lambda _: next(gathered))
            else:
                write_object(draft, part)
        for name in (index_name, *([single] if len(parts) > 1 else [])):
            (folder / name).unlink(missing_ok=True)
        fsync(folder)
    _delete(folder, _files(pattern), keep={*names, *([index_name] if len(parts) > 1 else [])})
    fsync(folder)


def _files(pattern: str) -> str:
    """Return a regular expression for the names of weights, in one file or in shards, and of their index."""
    return r"(-\d{5}-of-\d{5})?".join(map(re.escape, pattern.split("{suffix}"))) + r"(\.index\.json)?"


def _delete(folder: Path, pattern: str, keep: Collection[str] = ()) -> None:
    """Delete the files whose names match ``pattern``: an index before the shards that it names."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.suffix != ".json"):
        if re.fullmatch(pattern, entry.name) and entry.name not in keep:
            entry.unlink()


def read_weights(folder: Path, index: int = 0, files: Collection[str] | None = None) -> dict[str, Any]:
    """Return the state dict of model ``index`` in ``folder``, with stored tensors.

    ``files``: the names of the files that may be opened, by default all in ``folder``. Prefers safetensors to pickles,
    in one file or in shards. Raises `CheckpointError` if there are none, and for an index that names other files.
    """
    names = {entry.name for entry in folder.iterdir()} if files is None else files
    for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME):
        path = folder / numbered_name(name, index)
        index_path = path.with_name(f"{path.name}.index.json")
        if path.name in names:
            return read_state_dict(path)
        if index_path.name in names:
            paths = sorted(set(read_index(index_path).values()))
            missing = next((path.name for path in paths if path.name not in names), None)
            if missing is not None:
                raise CheckpointError(f"{index_path} names {missing}, which the checkpoint does not have")
            return {key: value for path in paths for key, value in read_state_dict(path).items()}
    raise CheckpointError(
        f"{folder} has no {numbered_name(SAFE_WEIGHTS_NAME, index)} and no {numbered_name(WEIGHTS_NAME, index)}: "
        "it was saved with fewer objects prepared, or by another program"
    )


def read_state_dict(path: Path) -> dict[str, Any]:
    """Return the state dict in a file of weights, safetensors or pickle, with stored tensors."""
    if path.suffix == ".safetensors":
        return dict(SafetensorsFile(path).tensors)
    state = read_object(path, stored=True)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    # What is no tensor (extra state) may hold some, and goes to code that keeps them.
    return {key: value if isinstance(value, StoredTensor) else read_all(value) for key, value in state.items()}


# Files of single objects, outside checkpoints.


def is_writer(state: PartialState, save_on_each_node: bool) -> bool:
    """Return True if this process writes shared data: one process in the world, or one per node."""
    return state.is_local_main_process if save_on_each_node else state.is_main_process


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write ``obj`` to the file ``f`` on the main process, or with ``save_on_each_node`` on one per node.

    An existing file is replaced atomically. With ``safe_serialization`` ``obj`` must be a dict of tensors and is
    written as a safetensors file; names that share memory with an earlier one are dropped, with a warning.
    Otherwise `torch.save` writes it, and ``f`` may be an open file.
    """
    if not is_writer(PartialState(), save_on_each_node):
        return
    if hasattr(f, "write"):
        if safe_serialization:
            raise ArgumentError("save(safe_serialization=True) needs a path, not an open file")
        torch.save(obj, f)
        return
    path = Path(f)
    try:
        with reporting_full_disk(), replacing(path) as draft:
            if safe_serialization:
                if not isinstance(obj, dict) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
                    raise ArgumentError("save(safe_serialization=True) takes a dict of tensors")
                write_tensors(draft, clean_state_dict_for_safetensors(obj))
            else:
                write_object(draft, obj)
    except CheckpointError as error:
        raise CheckpointError(f"saving {path}: {error}") from error


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call `torch.load` with ``weights_only=True`` by default, and with NumPy arrays allowed in the file."""
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(numpy_types()):
        return torch.load(f, map_location=map_location, **kwargs)
