"""The processes of a world as a grid, with a dimension for each kind of parallelism."""

from __future__ import annotations

import math
import os
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any

from accel.errors import ArgumentError
from accel.plugins.parallelism import DIMENSIONS, ParallelismConfig
from accel.state import AcceleratorState
from accel.world.environment import read_int

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """All dimensions of a configuration, those of size 1 too, and this process's rank in them.

    ``device_mesh``: torch's device mesh; None in a world of one.

    Open sizes are set in ``config``: if models are ``sharded``, ``dp_shard_size`` is the rest of the world;
    otherwise ``dp_replicate_size``. ``hybrid``: every node has one replica.

    Raises `ArgumentError`, before any collective, if the product of the sizes is not the world size, or
    two dimensions split the sequence.
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
            resolve_open_dimension(config, state.num_processes, "dp_shard" if sharded else "dp_replicate")
        config.check(state.num_processes)
        if state.use_distributed:
            existing = state.device_mesh  # of an earlier Accelerator
            same_shape = existing is not None and tuple(existing.shape) == tuple(self.sizes.values())
            config.device_mesh = self.device_mesh = (
                existing if same_shape else config.build_device_mesh(state.device.type)
            )

    def __getitem__(self, name: str) -> DeviceMesh:
        """Return the submesh of one dimension."""
        mesh: Any = self.device_mesh
        part: DeviceMesh = mesh[name]
        return part

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension, outermost first."""
        return self.config.sizes

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

    @cached_property
    def sharding(self) -> DeviceMesh | None:
        """The submesh for `fully_shard`: one dimension, or with the replicas in front; None if it has one process."""
        if self.sizes["tp"] == self.config.total_size > 1:
            return None
        mesh: Any = self.device_mesh
        name = "fsdp" if self.sizes["cp"] * self.sizes["sp"] > 1 else "dp_shard"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch advises to keep flattened dimensions, as here
            part: DeviceMesh = mesh["dp_replicate", name] if self.sizes["dp_replicate"] > 1 else mesh[name]
        return part


def resolve_open_dimension(config: ParallelismConfig, world: int, open_dimension: str) -> None:
    """Set ``open_dimension``, unless its size is explicit, to the world size divided by the other sizes."""
    if open_dimension in config.explicit_sizes or (
        config.explicit_sizes and open_dimension == "dp_replicate" and config.total_size > 1
    ):
        return
    product = config.total_size // config.sizes[open_dimension]
    if world % product:
        listing = " × ".join(f"{name}_size={size}" for name, size in config.sizes.items() if size > 1)
        raise ArgumentError(f"ParallelismConfig: number of processes ({world}) is not divisible by {listing}")
    setattr(config, f"{open_dimension}_size", world // product)


def _resolve_by_node(config: ParallelismConfig, world: int) -> None:
    local_size = read_int(os.environ, "LOCAL_WORLD_SIZE", minimum=1) or world
    if world % local_size:
        raise ArgumentError(
            f"HYBRID_SHARD: this node has {local_size} of {world} processes, so nodes differ: "
            "pass parallelism_config=ParallelismConfig(dp_replicate_size=…, dp_shard_size=…)"
        )
    config.dp_replicate_size, config.dp_shard_size = world // local_size, local_size
