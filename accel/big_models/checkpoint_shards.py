"""The files of a checkpoint, read one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from accel.big_models.device_map import device_of
from accel.big_models.devices import CPU, Device, as_device
from accel.errors import CheckpointError
from accel.tensor_files import SafetensorsFile, StoredTensor, read_index, read_object

# In order of preference: safetensors, which can hold no code, is loaded if a folder has both.
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class Shard(Protocol):
    """One file of a checkpoint."""

    path: Path

    def names(self) -> list[str]: ...

    def get(self, name: str) -> torch.Tensor: ...

    def stored_name(self, name: str) -> str:
        """Return the name under which the file stores ``name``: another one if the two are tied."""
        ...


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a checkpoint, and the file of each tensor if there is an index."""

    paths: tuple[Path, ...]
    file_of: Mapping[str, Path] | None = None

    def shards(self) -> Iterator[Shard]:
        """Yield each file, opened on demand. Raises `CheckpointError` for one that lacks a tensor of the index."""
        for path in self.paths:
            shard = open_shard(path)
            if self.file_of is not None:
                present = set(shard.names())
                missing = [name for name, file in self.file_of.items() if file == path and name not in present]
                if missing:
                    raise CheckpointError(f"{path} lacks {first_few(missing)}, which the index lists for it")
            yield shard

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor ``name``, one of `names`, from its file."""
        paths = self.paths if self.file_of is None else (self.file_of[name],)
        return next(shard.get(name) for shard in map(open_shard, paths) if name in shard.names())

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        if self.file_of is not None:
            return list(self.file_of)
        return [name for path in self.paths for name in open_shard(path).names()]


def find_files(checkpoint: str | os.PathLike[str]) -> CheckpointFiles:
    """Return the files of ``checkpoint``: a file of weights, an index of such files, or a folder with either.

    Raises `CheckpointError` for anything else, and for an index that names a missing file.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _read_index(path) if path.suffix == ".json" else CheckpointFiles((path,))
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist: pass a file of weights, an index or a folder")
    for name in _SINGLE_FILES:
        if (path / name).is_file():
            return CheckpointFiles((path / name,))
    indexes = sorted(path.glob("*.index.json"))
    standard = [path / name for name in _INDEXES if path / name in indexes]
    if len(standard or indexes) > 1 and not standard:
        raise CheckpointError(f"{path} holds several indexes: pass one of {', '.join(file.name for file in indexes)}")
    if not indexes:
        raise CheckpointError(f"{path} holds none of {', '.join(_SINGLE_FILES)} and no *.index.json")
    return _read_index((standard or indexes)[0])


def _read_index(path: Path) -> CheckpointFiles:
    file_of = read_index(path)
    paths = sorted(set(file_of.values()))
    missing = [file.name for file in paths if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path.name} names {first_few(missing)}, missing in {path.parent}")
    return CheckpointFiles(tuple(paths), file_of)


def first_few(names: list[str], limit: int = 5) -> str:
    """Return the first few of ``names``, and the number of the others, as text."""
    suffix = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + suffix


def open_shard(path: str | os.PathLike[str]) -> Shard:
    """Open a file of weights: safetensors by its suffix, otherwise one by `torch.save`. Raises `CheckpointError`."""
    path = Path(path)
    return _Safetensors(path) if path.suffix == ".safetensors" else _Pickled(path)


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = SafetensorsFile(path)
        layout = self._file.metadata.get("format", "pt")
        if layout not in ("pt", "np"):
            raise CheckpointError(f"{path} was saved by {layout!r}, whose layout of weights differs from torch's")

    def names(self) -> list[str]:
        return list(self._file.tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._file.tensors[name]

    def stored_name(self, name: str) -> str:
        return self._file.aliases.get(name, name)


class _Pickled:
    """A file by `torch.save`; types that could run code are refused."""

    def __init__(self, path: Path) -> None:
        self.path = path
        loaded = read_object(path, stored=True)
        if not isinstance(loaded, Mapping):
            raise CheckpointError(f"{path} holds one {type(loaded).__name__}: pass the file of a model's state_dict")
        extra = [str(key) for key, value in loaded.items() if not isinstance(value, torch.Tensor)]
        if extra:
            raise CheckpointError(
                f"{path} holds more than tensors ({first_few(extra)}): pass the file of a model's state_dict alone"
            )
        self._tensors: Mapping[str, torch.Tensor] = loaded

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def stored_name(self, name: str) -> str:
        return name


def offload_entry(shard: Shard, name: str) -> dict[str, str] | None:
    """Return an entry for an index of offloaded weights that locates the tensor ``name``; ``None`` for pickles."""
    if not isinstance(shard, _Safetensors):
        return None
    return {"safetensors_file": str(shard.path.absolute()), "weight_name": shard.stored_name(name)}


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Device] | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of one file by name, each on its device in ``device_map``, or else on the host.

    A tensor whose device is ``"disk"`` is loaded to the host too. Nothing refers to the file afterwards. Raises
    `CheckpointError` for a file that cannot be loaded safely.
    """
    shard = open_shard(checkpoint_file)
    tensors: dict[str, torch.Tensor] = {}
    for name in shard.names():
        stored_name = shard.stored_name(name)
        if stored_name in tensors:
            tensors[name] = tensors[stored_name]
        else:
            device = CPU if device_map is None else _device_for(name, device_map)
            tensors[name] = in_memory(shard.get(name), device)
    return tensors


def in_memory(tensor: torch.Tensor, device: torch.device | str = CPU, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy a tensor in a file, or a memory-mapped one, to ``device``, so that it does not change with the file."""
    if isinstance(tensor, StoredTensor):
        return tensor.read(device, dtype)
    return tensor.to(device, dtype, copy=True)


def _device_for(name: str, device_map: Mapping[str, Device]) -> torch.device:
    device = device_of(name, device_map)
    return CPU if device is None or device == "disk" else as_device(device)
