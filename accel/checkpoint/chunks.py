"""Sharded tensors on disk: each process writes its shards, and they can be read back with any other sharding.

A process writes one safetensors file, ``chunks/node_<node>/rank_<rank>.safetensors``. The entry
``accel_chunks`` of its metadata maps each chunk to its full tensor and its offset there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from accel.checkpoint.file_names import CHUNKS
from accel.checkpoint.tensors import let_go, read_tensors_and_metadata
from accel.errors import CheckpointError
from accel.parallel.shares import is_spread

_TABLE = "accel_chunks"

Place: TypeAlias = tuple[int, ...]


def place_of(tensor: Any) -> tuple[Place, torch.Tensor]:
    """Return the offset of this process's part of ``tensor``, and the part, which shares its memory."""
    if not is_spread(tensor):
        return (0,) * tensor.ndim, tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tensor.to_local()


def own_chunks(
    tensors: Mapping[str, torch.Tensor], *, keeper: bool, every_copy: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parts of ``tensors`` that this process writes, and the metadata of their file.

    ``keeper``: True if it writes tensors that every process holds in full.
    ``every_copy``: True if it also writes parts that other processes hold, since its disk is its own.
    """
    parts: dict[str, torch.Tensor] = {}
    table: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if (every_copy or _is_first_copy(tensor)) if is_spread(tensor) else keeper:
            offset, part = place_of(tensor)
            parts[name] = part.detach()
            table[name] = [list(tensor.shape), list(offset)]
    return parts, {_TABLE: json.dumps(table)}


def _is_first_copy(tensor: Any) -> bool:
    places = tensor.device_mesh.get_coordinate()
    return not any(at for at, placement in zip(places, tensor.placements, strict=True) if placement.is_replicate())


class Saved:
    """Saved tensors by name, each in as many chunks as it was written in.

    ``where``: the name of their place in error messages.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.mapped = False  # whether they are pages of files, which need not stay in memory
        self.shapes: dict[str, Place] = {}
        self._chunks: dict[str, dict[tuple[Place, Place], Any]] = {}

    @classmethod
    def whole(cls, tensors: Mapping[str, torch.Tensor], where: str) -> Saved:
        """Create from full tensors, with one chunk each."""
        saved = cls(where)
        for name, tensor in tensors.items():
            saved.add(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        return saved

    @classmethod
    def in_folder(cls, folder: Path) -> Saved:
        """Read all chunks of a checkpoint, memory-mapped. Raises `CheckpointError` for a damaged file."""
        saved = cls(str(folder))
        saved.mapped = True
        for path in sorted(folder.glob(CHUNKS)):
            tensors, metadata = read_tensors_and_metadata(path)
            try:
                for name, (shape, offset) in json.loads(metadata[_TABLE]).items():
                    saved.add(name, tuple(shape), tuple(offset), tensors[name])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be loaded: its table of chunks is damaged") from error
        return saved

    def add(self, name: str, shape: Place, offset: Place, data: Any) -> None:
        """Add a chunk of the tensor ``name``: a tensor, or an object with its shape and dtype that slices to one."""
        if self.shapes.setdefault(name, shape) != shape:
            raise CheckpointError(f"{self.where}: {name} is {self.shapes[name]} in one file and {shape} in another")
        self._chunks.setdefault(name, {})[offset, tuple(data.shape)] = data

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def under(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, without it."""
        return [name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)]

    def renamed(self, names: Mapping[str, str]) -> Saved:
        """Return a subset under new names; ``names`` maps new names to present ones."""
        saved = Saved(self.where)
        saved.mapped = self.mapped
        saved.shapes = {name: self.shapes[old] for name, old in names.items()}
        saved._chunks = {name: self._chunks[old] for name, old in names.items()}
        return saved

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the saved tensor."""
        kind: torch.dtype = next(iter(self._chunks[name].values())).dtype
        return kind

    def gathered(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return full tensors in memory, by the names under ``prefix``; tied names share one tensor."""
        made: dict[int, torch.Tensor] = {}
        found: dict[str, torch.Tensor] = {}
        for name in self.under(prefix):
            first = next(iter(self._chunks[prefix + name].values()))
            if id(first) not in made:
                made[id(first)] = torch.empty(self.shapes[prefix + name], dtype=first.dtype)
                self.fill(prefix + name, made[id(first)])
            found[name] = made[id(first)]
        return found

    @torch.no_grad()
    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy what was saved under ``name`` to this process's part of ``tensor``.

        Raises `CheckpointError` if the full shapes differ or chunks of this part are missing.
        """
        if self.shapes[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{self.where}: {name} is {self.shapes[name]} there, and {tuple(tensor.shape)} in this run"
            )
        offset, part = place_of(tensor)
        lacking = part.numel()
        for (start, size), data in self._chunks[name].items():
            common = [
                (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offset, part.shape, start, size, strict=True)
            ]
            if all(first < past for first, past in common):
                source = data[_slices(common, start)]
                target = part[_slices(common, offset)]
                target.copy_(source)
                if self.mapped:
                    let_go(source)
                lacking -= target.numel()
        if lacking:
            raise CheckpointError(f"{self.where}: {lacking} elements of {name} are not there{self._why()}")

    def _why(self) -> str:
        files = list(Path(self.where).glob(CHUNKS))
        nodes = sorted({path.parent.name.removeprefix("node_") for path in files}, key=int)
        ranks = sorted({path.stem.removeprefix("rank_") for path in files}, key=int)
        if not files:
            return ""
        return (
            f": it has the chunks of rank {', '.join(ranks)} on node {', '.join(nodes)} alone. Load it with "
            "the processes that it was saved by, or save to a file system that all nodes share"
        )


def _slices(common: Sequence[tuple[int, int]], start: Place) -> tuple[slice, ...]:
    return tuple(slice(first - at, past - at) for (first, past), at in zip(common, start, strict=True))
