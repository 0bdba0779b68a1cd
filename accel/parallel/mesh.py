"""The processes of a world as a grid, with a dimension for each kind of parallelism."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel.errors import ArgumentError
from accel.plugins.parallelism import DIMENSIONS, ParallelismConfig
from accel.state import AcceleratorState
from accel.world.environment import read_int

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_UNSUPPORTED = {"cp": "context parallelism", "sp": "sequence parallelism", "tp": "tensor parallelism"}
# Combined dimensions, by Accelerate's names.
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
}


class Mesh:
    """All dimensions of a configuration, those of size 1 too, and this process's rank in them.

    ``device_mesh``: torch's device mesh; None in a world of one.

    Open sizes are set in ``config``: if models are ``sharded``, ``dp_shard_size`` is the rest of the world;
    otherwise ``dp_replicate_size``. ``hybrid``: every node has one replica.

    Raises `ArgumentError`, before any collective, if the product of the sizes is not the world size, or for a
    dimension that this version does not have.
    """

    def __init__(
        self, config: ParallelismConfig, state: AcceleratorState, *, sharded: bool = False, hybrid: bool = False
    ) -> None:
        self.config = config
        self.state = state
        self.device_mesh: DeviceMesh | None = None
        if hybrid and not config.explicit_sizes:
            _resolve_by_node(config, state.num_processes)
        else:
            _resolve_open_dimension(config, state.num_processes, "dp_shard" if sharded else "dp_replicate")
        self.check()
        if state.use_distributed:
            existing = state.device_mesh  # of an earlier Accelerator
            same_shape = existing is not None and tuple(existing.shape) == tuple(self.sizes.values())
            config.device_mesh = self.device_mesh = existing if same_shape else self._make()

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension, outermost first."""
        return self.config.sizes

    def check(self) -> None:
        """Raise `ArgumentError` for an impossible combination of sizes."""
        for name, feature in _UNSUPPORTED.items():
            if self.sizes[name] > 1:
                raise ArgumentError(
                    f"ParallelismConfig({name}_size={self.sizes[name]}): {feature} is not in this version of accel: "
                    "leave it out"
                )
        total, world = self.config.total_size, self.state.num_processes
        if total != world:
            listing = (
                " × ".join(f"{name}_size={size}" for name, size in self.sizes.items() if size > 1) or "all sizes 1"
            )
            raise ArgumentError(f"ParallelismConfig: {listing} is {total}, but this world has {world} processes")

    def rank(self, name: str) -> int:
        """Return this process's rank in a dimension."""
        stride = math.prod(list(self.sizes.values())[DIMENSIONS.index(name) + 1 :])
        return self.state.process_index // stride % self.sizes[name]

    @property
    def data_place(self) -> tuple[int, int]:
        """The number of data shares, and the index of this process's share."""
        return (
            self.config.data_parallel_size,
            self.rank("dp_replicate") * self.sizes["dp_shard"] + self.rank("dp_shard"),
        )

    @property
    def sharding(self) -> DeviceMesh:
        """The submesh for `fully_shard`: one dimension, or with the replicas in front."""
        mesh: Any = self.device_mesh
        part: DeviceMesh = mesh["dp_replicate", "dp_shard"] if self.sizes["dp_replicate"] > 1 else mesh["dp_shard"]
        return part

    def _make(self) -> DeviceMesh:
        from torch.distributed.device_mesh import DeviceMesh

        world = torch.arange(self.state.num_processes).view(tuple(self.sizes.values()))
        coordinates = (world == self.state.process_index).nonzero()[0].tolist()
        # Only its members create a group: by default all processes of the world would wait for each group.
        by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(world.numel())): dist.group.WORLD}  # type: ignore[dict-item]
        groups = []
        for axis in range(world.ndim):
            selection = tuple(slice(None) if axis == dim else index for dim, index in enumerate(coordinates))
            ranks = tuple(world[selection].tolist())
            if ranks not in by_ranks:
                by_ranks[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
            groups.append(by_ranks[ranks])
        mesh = DeviceMesh.from_group(groups, self.state.device.type, world, mesh_dim_names=DIMENSIONS)
        for name, parts in _FLATTENED.items():
            mesh[parts]._flatten(name)
        return mesh


def _resolve_open_dimension(config: ParallelismConfig, world: int, open_dimension: str) -> None:
    """Set ``open_dimension``, unless its size is explicit, to the world size divided by the other sizes."""
    if open_dimension in config.explicit_sizes or (
        config.explicit_sizes and open_dimension == "dp_replicate" and config.total_size > 1
    ):
        return
    product = config.total_size // config.sizes[open_dimension]
    if world % product:
        listing = " × ".join(f"{name}_size={size}" for name, size in config.sizes.items() if size > 1)
        raise ArgumentError(f"ParallelismConfig: {listing} does not divide the {world} processes of this world")
    setattr(config, f"{open_dimension}_size", world // product)


def _resolve_by_node(config: ParallelismConfig, world: int) -> None:
    local_size = read_int(os.environ, "LOCAL_WORLD_SIZE", minimum=1) or world
    if world % local_size:
        raise ArgumentError(
            f"HYBRID_SHARD: this node has {local_size} of {world} processes, so nodes differ: "
            "pass parallelism_config=ParallelismConfig(dp_replicate_size=…, dp_shard_size=…)"
        )
    config.dp_replicate_size, config.dp_shard_size = world // local_size, local_size
