"""Folders of `torch.distributed.checkpoint` (DCP), which other programs write and read.

No code in them runs: ``.metadata`` is a pickle, and its unpickler admits only DCP's own classes. Everything
else is read with ``weights_only=True``.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save

from accel.checkpoint.all_ranks import run_on_all_ranks
from accel.checkpoint.chunks import Chunks
from accel.checkpoint.files import numpy_types
from accel.errors import CheckpointError
from accel.state import PartialState
from accel.tensor_files import TYPES, read_object

METADATA = ".metadata"


class DcpFolder:
    """A folder that DCP wrote. Each process reads only the parts of tensors that it needs.

    ``tensors``: all tensors, by their names in the folder.
    ``paths``: the keys that lead to each item in the saved object.

    Raises `CheckpointError` for a folder that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors = Chunks(str(folder))
        self.paths: dict[str, tuple[Any, ...]] = {}
        self._object_items: dict[str, Any] = {}
        metadata = _read_metadata(folder)
        try:
            for name, item_metadata in metadata.state_dict_metadata.items():
                self.paths[name] = (metadata.planner_data or {}).get(name, (name,))
                if not isinstance(item_metadata, TensorStorageMetadata):
                    self._object_items[name] = metadata.storage_data[MetadataIndex(name)]
                    continue
                for chunk in item_metadata.chunks:
                    entry = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
                    stored = _Chunk(folder, entry, item_metadata.properties.dtype, tuple(chunk.sizes))
                    self.tensors.add(name, tuple(item_metadata.size), tuple(chunk.offsets), stored)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be read: its {METADATA} is damaged") from error

    def read_object(self, name: str) -> Any:
        """Read the item ``name``, which is no tensor, or return None without one."""
        return _read_item(self.folder, self._object_items[name]) if name in self._object_items else None

    def nested(self, key: str, skip: Collection[str] = (), as_outline: bool = False) -> dict[str, Any]:
        """Read the items saved under ``key`` as nested dicts and lists, without the names in ``skip``.

        ``as_outline``: put tensors on the meta device in place of the saved ones.
        """
        names = [name for name, path in self.paths.items() if path[0] == key and len(path) > 1 and name not in skip]
        saved = self.tensors.renamed({name: name for name in names if name in self.tensors})
        tensors = (
            {
                name: torch.empty(shape, dtype=saved.first(name).dtype, device="meta")
                for name, shape in saved.shapes.items()
            }
            if as_outline
            else saved.gathered("")
        )
        items = {name: tensors[name] if name in tensors else self.read_object(name) for name in names}
        nested_items: dict[str, Any] = unflatten_state_dict(items, self.paths).get(key, {})
        return nested_items


def write_dcp(folder: Path, state: dict[str, Any]) -> None:
    """Write this process's part of ``state`` to ``folder``; all processes must call it. Raises `CheckpointError`."""
    run_on_all_ranks(f"saving {folder}", lambda: _clear(folder))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # in a world of one process
            save(state, storage_writer=FileSystemWriter(folder))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be written: {_last_line(error)}") from error


def _clear(folder: Path) -> None:
    """Remove an older checkpoint: the new one may have fewer files, and is complete once it has its ``.metadata``."""
    folder.mkdir(parents=True, exist_ok=True)
    if PartialState().is_local_main_process:
        for path in (folder / METADATA, *folder.glob("*.distcp")):
            path.unlink(missing_ok=True)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A chunk of a tensor in a file."""

    folder: Path
    entry: Any
    dtype: torch.dtype
    shape: tuple[int, ...]

    def open(self) -> torch.Tensor:
        value = _read_item(self.folder, self.entry, stored=True)
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != self.shape:
            raise CheckpointError(f"{self.folder} cannot be read: {self.entry.relative_path} differs from {METADATA}")
        return value


def _read_item(folder: Path, entry: Any, *, stored: bool = False) -> Any:
    name = entry.relative_path
    if getattr(entry, "transform_descriptors", None):
        raise CheckpointError(f"{folder} cannot be read: {name} is compressed by an extension of DCP")
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise CheckpointError(f"{folder} cannot be read: its {METADATA} names {name!r}, which is not in its folder")
    return read_object(folder / name, stored=stored, part=(entry.offset, entry.length), allowed=numpy_types())


def _last_line(error: BaseException) -> str:
    """Return the last line of a message, the cause: DCP joins the tracebacks of all ranks into one message."""
    return (f"{error}".strip().splitlines() or [type(error).__name__])[-1].strip()[:300]


# The names that `.metadata`, a pickle, may refer to; any other could run code.
_ALLOWED: Mapping[str, set[str] | None] = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"} | {str(kind).removeprefix("torch.") for kind in TYPES},
    "pathlib": {"Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        names = _ALLOWED.get(module, set())
        attribute = super().find_class(module, name) if names is None or name in names else None
        if attribute is None or (names is None and not isinstance(attribute, type)) or "." in name:
            raise pickle.UnpicklingError(f"its {METADATA} names {module}.{name}, which is not allowed in checkpoints")
        return attribute


def _read_metadata(folder: Path) -> Any:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory")
    if not (folder / METADATA).is_file():
        parts = sorted(path.parent.name for path in folder.glob(f"*/{METADATA}"))
        hint = f". Pass one of its subdirectories: {', '.join(parts)}" if parts else ""
        raise CheckpointError(f"{folder} is not a sharded checkpoint: it has no {METADATA}{hint}")
    try:
        with (folder / METADATA).open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {_last_line(error)}") from error
