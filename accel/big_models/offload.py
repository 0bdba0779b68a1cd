"""Offloaded weights: a folder with a raw file per tensor and an index, read back memory-mapped.

The layout is Accelerate's: ``NAME.dat`` and ``index.json`` (name → ``dtype`` and ``shape``). An entry of the
index may instead refer to a safetensors file (``safetensors_file``, ``weight_name``).
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from accel.big_models.devices import CPU, Device, as_device, dtype_named
from accel.errors import ArgumentError, CheckpointError, nearest
from accel.tensor_files import SafetensorsFile

# Memory-mapped tensors: nothing is read before it is used, and a dropped tensor frees its memory.

_ALIGNMENT = 64  # bytes, as torch allocates on the host


def map_tensor(path: str | os.PathLike[str], dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Memory-map the tensor at byte ``offset`` of a file. Writes to the tensor do not reach the file."""
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
    """Return ``tensor``, copied if it is not aligned as torch's own allocations are.

    Kernels depend on the alignment: the last bits of a result can differ with it.
    """
    return tensor.clone() if tensor.numel() and tensor.data_ptr() % _ALIGNMENT else tensor


# The folder and its index.

Index = dict[str, dict[str, Any]]
INDEX_NAME = "index.json"
_PIECE = 1 << 22  # elements


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: str | os.PathLike[str], index: Index | None = None
) -> Index | None:
    """Write ``weight`` to ``offload_folder``, add it to ``index`` and return that; the index is not written.

    The file is written atomically. Raises `CheckpointError` if it cannot be written.
    """
    entry = WeightFiles(offload_folder).write(weight, weight_name)
    if index is not None:
        index[weight_name] = entry
    return index


class WeightFiles:
    """Writes weights to a folder, converting each through one small buffer."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._buffer = torch.empty(0)

    def write(self, weight: torch.Tensor, name: str, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Write ``weight``, as ``dtype`` unless that is None; return its index entry."""
        dtype = dtype or weight.dtype
        path = self._folder / f"{name}.dat"
        partial = path.with_name(f"{path.name}.partial")
        flat = weight.detach().contiguous().reshape(-1)
        try:
            with partial.open("wb") as file:
                for start in range(0, flat.numel(), _PIECE):
                    file.write(self._bytes(flat[start : start + _PIECE], dtype))
            partial.replace(path)
        except OSError as error:
            raise _write_error(path, flat.numel() * dtype.itemsize, error) from error
        finally:
            partial.unlink(missing_ok=True)
        return {"dtype": str(dtype).removeprefix("torch."), "shape": list(weight.shape)}

    def _bytes(self, piece: torch.Tensor, dtype: torch.dtype) -> memoryview:
        if piece.dtype != dtype or piece.device != CPU:
            if self._buffer.dtype != dtype or self._buffer.numel() < piece.numel():
                self._buffer = torch.empty(piece.numel(), dtype=dtype)
            piece = self._buffer[: piece.numel()].copy_(piece)
        return memoryview(piece.view(torch.uint8).numpy().data)


def _write_error(path: Path, size: int, error: OSError) -> CheckpointError:
    try:
        free = f", {shutil.disk_usage(path.parent).free} bytes are free there"
    except OSError:
        free = ""
    return CheckpointError(f"{path} ({size} bytes) cannot be written: {error.strerror}{free}")


def load_offloaded_weight(weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Memory-map the tensor in ``weight_file``, described by its entry of the index.

    The file is read on access; writes to the tensor do not reach it. Raises `CheckpointError` for a file that is
    missing or differs in length from the entry.
    """
    shape = tuple(weight_info["shape"])
    dtype = dtype_named(weight_info["dtype"])
    assert dtype is not None
    count = torch.Size(shape).numel()
    try:
        length = os.stat(weight_file).st_size
    except OSError as error:
        raise CheckpointError(f"offloaded weight {weight_file} cannot be read: {error.strerror}") from error
    if length != count * dtype.itemsize:
        raise CheckpointError(
            f"offloaded weight {weight_file} has {length} bytes, but its index entry ({weight_info['dtype']} "
            f"{list(shape)}) needs {count * dtype.itemsize}"
        )
    return map_tensor(weight_file, dtype, shape)


def save_offload_index(index: Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Add ``index`` to the index in ``offload_folder``; do nothing for an empty one."""
    if not index:
        return
    path = Path(offload_folder) / INDEX_NAME
    existing = read_offload_index(offload_folder) if path.is_file() else {}
    text = json.dumps({**existing, **index}, indent=2)
    partial = path.with_name(f"{INDEX_NAME}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise _write_error(path, len(text), error) from error
    finally:
        partial.unlink(missing_ok=True)


def read_offload_index(offload_folder: str | os.PathLike[str]) -> Index:
    """Return the index in ``offload_folder``. Raises `CheckpointError` if it is missing or cannot be read."""
    path = Path(offload_folder) / INDEX_NAME
    try:
        index: Index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{offload_folder} has no {INDEX_NAME}: no weights were offloaded there") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return index


def offload_state_dict(save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every tensor of ``state_dict``, then the index, to ``save_dir``; names of one tensor share a file."""
    os.makedirs(save_dir, exist_ok=True)
    index: Index = {}
    first_names: dict[Any, str] = {}
    files = WeightFiles(save_dir)
    for name, tensor in state_dict.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first_names:
            alias_weight(first_names[key], name, save_dir)
            index[name] = index[first_names[key]]
        else:
            index[name] = files.write(tensor, name)
            first_names[key] = name
    save_offload_index(index, save_dir)


def alias_weight(source_name: str, name: str, folder: str | os.PathLike[str]) -> None:
    """Add ``name`` for the file of the weight ``source_name``, as a hard link, or a copy where that is not possible."""
    source, target = Path(folder) / f"{source_name}.dat", Path(folder) / f"{name}.dat"
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        try:
            os.link(source, partial)
        except OSError:
            shutil.copyfile(source, partial)
        partial.replace(target)
    except OSError as error:
        raise _write_error(target, source.stat().st_size, error) from error
    finally:
        partial.unlink(missing_ok=True)  # replacing one link of a file by another leaves both


class PrefixedDataset(Mapping[str, torch.Tensor]):
    """The part of a mapping whose names start with ``prefix``, which is removed from them."""

    def __init__(self, dataset: Mapping[str, torch.Tensor], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> torch.Tensor:
        return self.dataset[f"{self.prefix}{key}"]

    def reads_file(self, key: str) -> bool:
        """Return True if the tensor ``key`` is memory-mapped."""
        reads = getattr(self.dataset, "reads_file", None)
        return reads is not None and bool(reads(f"{self.prefix}{key}"))

    def __contains__(self, key: object) -> bool:
        return f"{self.prefix}{key}" in self.dataset

    def __iter__(self) -> Iterator[str]:
        return (key[len(self.prefix) :] for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights by name, from ``state_dict`` or, for names it lacks, from the files in ``index``.

    ``index`` defaults to the one in ``save_folder``. Tensors from files are memory-mapped if possible, or on
    ``device`` if one is given. Raises `ArgumentError` without any source, `CheckpointError` for a folder without
    an index, `KeyError` for an unknown name.
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Mapping[str, Any]] | None = None,
        device: Device | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ArgumentError("OffloadedWeightsLoader needs a state_dict, a save_folder or an index")
        if index is None and save_folder is not None:
            index = read_offload_index(save_folder)
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = {} if index is None else index
        self.device = device
        self.all_keys = list(dict.fromkeys([*self.state_dict, *self.index]))
        self._known = set(self.all_keys)
        self._files: dict[str, SafetensorsFile] = {}

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        if key not in self.index:
            raise KeyError(f"{key} is not among the offloaded weights{nearest(key, self.all_keys)}")
        entry = self.index[key]
        file = entry.get("safetensors_file")
        if file is None:
            if self.save_folder is None:
                raise CheckpointError(f"{key} is in its own file: pass save_folder")
            return load_offloaded_weight(os.path.join(self.save_folder, f"{key}.dat"), entry)
        tensor = self._in_safetensors(file, entry.get("weight_name", key))
        device = CPU if self.device is None else as_device(self.device)
        tensor = tensor.to(device, dtype_named(entry.get("dtype")))
        return aligned(tensor) if device == CPU else tensor

    def _in_safetensors(self, file: str, name: str) -> torch.Tensor:
        """Memory-map one tensor; the header of a file is read once, and again when the file has changed."""
        weights_file = self._files.get(file)
        if weights_file is None or weights_file.changed():
            weights_file = self._files[file] = SafetensorsFile(file)
        stored = weights_file.tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{file} holds no tensor {name!r}")
        return map_tensor(stored.path, stored.dtype, stored.shape, stored.offset)

    def reads_file(self, key: str) -> bool:
        """Return True if the tensor ``key`` is memory-mapped."""
        return key not in self.state_dict

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Return the part of ``state_dict`` that belongs to the named modules or tensors."""
    extracted: dict[str, torch.Tensor] = {}
    for module in submodule_names:
        prefix = f"{module}." if module else ""
        extracted |= {name: value for name, value in state_dict.items() if name == module or name.startswith(prefix)}
    return extracted
