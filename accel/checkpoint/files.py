"""Files of a checkpoint: written once, from start to end, with their digest taken on the way and pushed to the disk.

Tensors of models are safetensors; everything else is what `torch.save` writes, which is only ever read back with
``weights_only=True``, so that no file of a checkpoint can run code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from accel.errors import CheckpointError

_CHUNK = 1 << 24
_LARGE = 1 << 18

# torch's name of a type → safetensors' (https://github.com/huggingface/safetensors, "Format")
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


@dataclass(frozen=True)
class Digest:
    """Length in bytes and SHA-256 of a file."""

    length: int
    sha256: str


class _Hashing:
    """The part of a writable file that torch uses, hashing what goes through; large pieces while they are written."""

    def __init__(self, file: IO[bytes], helper: ThreadPoolExecutor) -> None:
        self._file = file
        self._helper = helper
        self._hash = hashlib.sha256()
        self._length = 0

    def write(self, data: bytes | memoryview) -> int:
        self._length += len(data)
        if len(data) < _LARGE:
            self._hash.update(data)
            self._file.write(data)
        else:
            hashed = self._helper.submit(self._hash.update, data)
            self._file.write(data)
            hashed.result()
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> Digest:
        return Digest(self._length, self._hash.hexdigest())


def _write(path: Path, fill: Callable[[Any], None]) -> Digest:
    with path.open("xb") as file, ThreadPoolExecutor(1) as helper:
        sink = _Hashing(file, helper)
        fill(sink)
        file.flush()
        os.fsync(file.fileno())
    return sink.digest()


def write_bytes(path: Path, data: bytes) -> Digest:
    """Write ``data`` to a new file and push it to the disk."""
    return _write(path, lambda sink: sink.write(data))


def write_object(path: Path, value: Any) -> Digest:
    """Write what `torch.save` makes of ``value``.

    Raises `CheckpointError` for a type that `read_object` would refuse: it is told when it can still be mended.
    """
    digest = _write(path, lambda sink: torch.save(value, sink))
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if refused:
        raise CheckpointError(
            f"{path.name} would hold {', '.join(sorted(set(refused)))}, which cannot be loaded safely: "
            "keep tensors, numbers, strings, lists, tuples and dicts in a state_dict"
        )
    return digest


def read_object(path: Path) -> Any:
    """Read what `write_object` wrote. Raises `CheckpointError` for a file that is damaged or holds other types."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> Digest:
    """Write ``tensors`` as a safetensors file, one at a time, so that no second copy of them all is made.

    Of names for the same memory (tied weights) the first is written and the others are noted in the header.
    """
    kept, aliases = _untie(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    end = 0
    for name, tensor in kept.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _type_name(path, name, tensor),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def fill(sink: Any) -> None:
        sink.write(len(text).to_bytes(8, "little"))
        sink.write(text)
        for tensor in kept.values():
            _write_elements(sink, tensor)

    return _write(path, fill)


def _write_elements(sink: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        data = memoryview(flat.view(torch.uint8).numpy().data)
        for start in range(0, len(data), _CHUNK):
            sink.write(data[start : start + _CHUNK])


def _type_name(path: Path, name: str, tensor: torch.Tensor) -> str:
    if tensor.dtype not in _TYPES:
        raise CheckpointError(f"{path.name}: {name} is {tensor.dtype}, which safetensors has no name for")
    return _TYPES[tensor.dtype]


def _untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    kept: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            kept[name] = tensor
    return kept, aliases


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; tied names come back as the same tensor. Raises `CheckpointError` for a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in names}
            aliases = {k: v for k, v in (file.metadata() or {}).items() if v in tensors}
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    for alias, name in aliases.items():
        tensors.setdefault(alias, tensors[name])
    return tensors


def digest_of(path: Path) -> Digest:
    """Read a file and return its digest."""
    sha = hashlib.sha256()
    length = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            sha.update(chunk)
            length += len(chunk)
    return Digest(length, sha.hexdigest())


def fsync_directory(path: Path) -> None:
    """Push the entries of a directory to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
