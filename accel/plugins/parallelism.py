"""`ParallelismConfig`, the sizes of the dimensions of parallelism."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any

from accel.errors import ArgumentError, one_of
from accel.world.environment import read_int

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # outermost first, as ranks are laid out
_VARIABLES = {
    "dp_replicate_size": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "dp_shard_size": "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "cp_size": "PARALLELISM_CONFIG_CP_SIZE",
    "sp_size": "PARALLELISM_CONFIG_SP_SIZE",
    "tp_size": "PARALLELISM_CONFIG_TP_SIZE",
    "cp_backend": "PARALLELISM_CONFIG_CP_BACKEND",
    "sp_backend": "PARALLELISM_CONFIG_SP_BACKEND",
}


@dataclass(repr=False)
class ParallelismConfig:
    """The number of processes along each dimension; their product is the world size.

    ``dp_replicate_size``: replicas of the model.
    ``dp_shard_size``: processes among which one replica is sharded.

    Missing sizes are read from ``PARALLELISM_CONFIG_DP_SHARD_SIZE`` and so on, and default to 1. If models are
    sharded and ``dp_shard_size`` is missing, it is the world size divided by the other sizes.

    Raises `ArgumentError` for a size below 1 and an unknown backend.
    """

    dp_replicate_size: int = None  # type: ignore[assignment]
    dp_shard_size: int = None  # type: ignore[assignment]
    tp_size: int = None  # type: ignore[assignment]
    cp_size: int = None  # type: ignore[assignment]
    cp_backend: str = None  # type: ignore[assignment]
    sp_size: int = None  # type: ignore[assignment]
    sp_backend: str = None  # type: ignore[assignment]
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None
    device_mesh: Any = field(default=None, init=False)  # set by an `Accelerator`

    def __post_init__(self) -> None:
        self.explicit_sizes: set[str] = set()  # dimensions whose size an argument or a variable sets
        for name in DIMENSIONS:
            self._resolve_size(f"{name}_size")
        for name, supported in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
            variable = _VARIABLES[name]
            explicit = getattr(self, name)
            source = f"environment variable {variable}" if explicit is None else f"ParallelismConfig({name}=…)"
            setattr(self, name, one_of(explicit or os.environ.get(variable, supported), (supported,), source=source))

    def _resolve_size(self, name: str) -> None:
        size = getattr(self, name)
        if size is None:
            size = read_int(os.environ, _VARIABLES[name], minimum=1)
            size = None if size == 1 else size  # launchers export 1 by default
        elif not isinstance(size, int) or size < 1:
            raise ArgumentError(f"ParallelismConfig({name}={size!r}): expects a whole number of 1 or more")
        if size is not None:
            self.explicit_sizes.add(name.removesuffix("_size"))
        setattr(self, name, 1 if size is None else size)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every dimension, outermost first."""
        return {name: getattr(self, f"{name}_size") for name in DIMENSIONS}

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if models are replicated."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if models are sharded over data-parallel processes."""
        return self.dp_shard_size > 1

    @property
    def tp_enabled(self) -> bool:
        """True if tensors are split over processes."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """True if sequences are split by context parallelism."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """True if sequences are split by sequence parallelism."""
        return self.sp_size > 1

    @property
    def data_parallel_size(self) -> int:
        """The number of processes with different data."""
        return self.dp_replicate_size * self.dp_shard_size

    @property
    def non_data_parallel_size(self) -> int:
        """The number of processes with the same data."""
        return self.tp_size * self.cp_size * self.sp_size

    @property
    def total_size(self) -> int:
        """The number of all processes."""
        return self.data_parallel_size * self.non_data_parallel_size

    def _enabled(self, *names: str) -> list[str]:
        return [name for name in names if self.sizes[name] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions above 1 along which processes see different data."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions above 1 along which processes see the same data."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions above 1 along which parameters are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions above 1 over which a loss is averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh for `fully_shard`."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions above 1."""
        return self.dp_dim_names + self.non_dp_dim_names

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the `Accelerator`'s mesh. Raises `ArgumentError` without one, and for another device type."""
        if self.device_mesh is None:
            raise ArgumentError(
                "ParallelismConfig.get_device_mesh: no mesh yet: pass the config to an Accelerator first"
            )
        if device_type not in (None, self.device_mesh.device_type):
            raise ArgumentError(
                f"ParallelismConfig.get_device_mesh({device_type!r}): the mesh is on {self.device_mesh.device_type}"
            )
        return self.device_mesh

    def __repr__(self) -> str:
        arguments = ", ".join(f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(self) if entry.init)
        return f"ParallelismConfig({arguments})"
