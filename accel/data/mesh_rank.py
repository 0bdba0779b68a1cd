"""A process's share of the data in a device mesh, and detection of loaders that are sharded already."""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

# Dimensions of a device mesh along which processes see different data; along all others they see the same.
_DATA_DIMENSIONS = ("dp", "fsdp", "dp_replicate", "dp_shard")


def data_place(mesh: Any) -> tuple[int, int] | None:
    """Return the number of data shares in a device mesh, and this process's index; ``None`` without a mesh."""
    if mesh is None:
        return None
    coordinates = mesh.get_coordinate()
    return _place(mesh, coordinates)


def _place(mesh: Any, coordinates: Any) -> tuple[int, int]:
    shares, index = 1, 0
    for name, size, at in zip(mesh.mesh_dim_names or (), mesh.mesh.shape, coordinates, strict=False):
        if name in _DATA_DIMENSIONS:
            shares, index = shares * size, index * size + int(at)
    return shares, index


def shares_by_rank(mesh: Any, processes: int) -> list[int]:
    """Return the data share of each rank: its own, or that of its place in ``mesh``."""
    if mesh is None:
        return list(range(processes))
    found = [0] * processes
    for coordinates in _all_coordinates(tuple(mesh.mesh.shape)):
        found[int(mesh.mesh[coordinates])] = _place(mesh, coordinates)[1]
    return found


def _all_coordinates(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = [()]
    for size in shape:
        rows = [(*row, at) for row in rows for at in range(size)]
    return rows


def is_shared_out(dataloader: Any) -> bool:
    """Return True if ``dataloader`` is this process's own share already.

    Detects torch's `DistributedSampler`, and a stream of the ``datasets`` library after its
    ``split_dataset_by_node``. Anything else needs ``already_sharded=True``.
    """
    outer = dataloader.sampler if isinstance(dataloader.sampler, BatchSampler) else dataloader.batch_sampler
    if isinstance(getattr(outer, "sampler", None), DistributedSampler):
        return True
    return is_datasets_stream(dataloader.dataset) and getattr(dataloader.dataset, "_distributed", None) is not None


def is_datasets_stream(dataset: Any) -> bool:
    """Return True for an ``IterableDataset`` of the ``datasets`` library, which knows its own files."""
    kinds = type(dataset).__mro__
    return any(kind.__module__ == "datasets.iterable_dataset" and kind.__name__ == "IterableDataset" for kind in kinds)
