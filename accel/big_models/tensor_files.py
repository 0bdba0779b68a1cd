"""Memory-mapped tensors: data are read on access, and a tensor without references leaves no memory behind.

The header of a safetensors file (https://github.com/huggingface/safetensors, "Format") is read here and not
by that library, which maps whole files that stay in the process's memory as long as the file is open.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from accel.errors import CheckpointError

# safetensors' name of a type → torch's; a torch that lacks one cannot load it.
_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
_ALIGNMENT = 64  # bytes, as torch allocates on the host
_LARGEST_HEADER = 100_000_000  # safetensors' own limit


def map_tensor(path: str | os.PathLike[str], dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Memory-map the tensor whose bytes start at ``offset`` of a file. Writes to it do not reach the file."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(tuple(shape), dtype=dtype)
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        mapped = mmap.mmap(
            file.fileno(), offset - start + count * dtype.itemsize, access=mmap.ACCESS_COPY, offset=start
        )
    flat = torch.frombuffer(mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset - start)
    if offset % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).reshape(tuple(shape))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, copied if it does not start at an address that torch would have chosen.

    Kernels depend on the alignment: the last bits of a result can differ with it.
    """
    return tensor.clone() if tensor.numel() and tensor.data_ptr() % _ALIGNMENT else tensor


class SafetensorsFile:
    """The header of a safetensors file, and memory-mapped access to its tensors.

    Raises `CheckpointError` for a file that is missing, cut short or no safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(_LARGEST_HEADER, stat.st_size - 8):
                    raise CheckpointError(f"{self.path} is no safetensors file, or is cut short")
                header = json.loads(file.read(length))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{self.path} is no safetensors file: its header is damaged") from error
        self.stamp = _stamp(stat)
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._start = 8 + length
        self._tensors: dict[str, Any] = header
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if self._start + end > stat.st_size:
            missing = self._start + end - stat.st_size
            raise CheckpointError(f"{self.path} is cut short: {missing} bytes are missing at its end")

    def names(self) -> list[str]:
        """Return the names of the tensors, in the order of the header."""
        return list(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        """Memory-map the tensor ``name``. Raises `CheckpointError` for one that is not here."""
        entry = self._tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} holds no tensor {name!r}")
        dtype = getattr(torch, _TYPES.get(entry["dtype"], ""), None)
        first, last = entry["data_offsets"]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.path}: {name} is of type {entry['dtype']}, which this torch does not have")
        if torch.Size(entry["shape"]).numel() * dtype.itemsize != last - first:
            raise CheckpointError(f"{self.path}: the header gives {name} {last - first} bytes for {entry['shape']}")
        return map_tensor(self.path, dtype, entry["shape"], self._start + first)

    def changed(self) -> bool:
        """Return True if the file has changed since its header was read."""
        try:
            return _stamp(os.stat(self.path)) != self.stamp
        except OSError:
            return True


def _stamp(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
