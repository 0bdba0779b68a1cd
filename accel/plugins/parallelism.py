"""`ParallelismConfig`, the sizes of the dimensions of parallelism, and the settings of each dimension."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from accel.errors import ArgumentError, one_of
from accel.world.environment import read_flag, read_int
from accel.world.process_group import new_device_mesh, world_from_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")  # outermost first, as ranks are laid out
_ATTENTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")
_VARIABLES = {
    "dp_replicate_size": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
    "dp_shard_size": "PARALLELISM_CONFIG_DP_SHARD_SIZE",
    "cp_size": "PARALLELISM_CONFIG_CP_SIZE",
    "sp_size": "PARALLELISM_CONFIG_SP_SIZE",
    "tp_size": "PARALLELISM_CONFIG_TP_SIZE",
    "cp_backend": "PARALLELISM_CONFIG_CP_BACKEND",
    "sp_backend": "PARALLELISM_CONFIG_SP_BACKEND",
}
# Combined dimensions, by Accelerate's names.
_FLATTENED = {
    "dp": ("dp_replicate", "dp_shard"),
    "dp_shard_cp": ("dp_shard", "cp"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "fsdp": ("dp_shard", "cp", "sp"),  # ours: the processes that shard a replica
    "dp_shard_tp": ("dp_shard", "tp"),  # ours: torch sums over both in one operation, and warns without it
}


@dataclass
class TorchTensorParallelConfig:
    """Settings of ``tp_size``. ``enable_async_tp`` has no effect, with a warning: it changes only the speed."""

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            warnings.warn(
                "TorchTensorParallelConfig(enable_async_tp=True) has no effect: collectives of split layers are "
                "synchronous",
                stacklevel=3,
            )


@dataclass
class TorchContextParallelConfig:
    """The exchange of keys and values between the parts of a sequence.

    ``"allgather"``, the default: each process has those of the whole sequence. ``"alltoall"``: they go around a ring,
    and a process has those of two parts at a time; for causal attention without masks and dropout. Read from
    ``PARALLELISM_CONFIG_CP_COMM_STRATEGY``. Raises `ArgumentError` for another strategy.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        variable = "PARALLELISM_CONFIG_CP_COMM_STRATEGY"
        source = "TorchContextParallelConfig(cp_comm_strategy=…)"
        if self.cp_comm_strategy is None:
            source = f"environment variable {variable}"
            self.cp_comm_strategy = os.environ.get(variable) or "allgather"
        one_of(self.cp_comm_strategy, ("allgather", "alltoall"), source=source)


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Settings of ``sp_size``, which needs none of them: a block takes every length that ``sp_size`` divides.

    ``sp_seq_length``: the length of all sequences, which must be set if ``sp_seq_length_is_variable`` is False.
    ``sp_attn_implementation``: the attention of the model. It is ``"sdpa"`` for `Accelerator.maybe_context_parallel`;
        under DeepSpeed it may also be ``"flash_attention_2"`` or ``"flash_attention_3"``.

    Missing values are read from ``PARALLELISM_CONFIG_SP_SEQ_LENGTH``, ``_SP_SEQ_LENGTH_IS_VARIABLE`` (default: True)
    and ``_SP_ATTN_IMPLEMENTATION``. Raises `ArgumentError` for another implementation and a length that is missing.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        call = "DeepSpeedSequenceParallelConfig"
        if self.sp_seq_length is None:
            self.sp_seq_length = read_int(os.environ, "PARALLELISM_CONFIG_SP_SEQ_LENGTH", minimum=1)
        if self.sp_seq_length_is_variable is None:
            variable = "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE"
            self.sp_seq_length_is_variable = read_flag(os.environ, variable, True)
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ArgumentError(f"{call}(sp_seq_length_is_variable=False) needs sp_seq_length")
        variable = "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION"
        source = f"{call}(sp_attn_implementation=…)"
        if self.sp_attn_implementation is None:
            source = f"environment variable {variable}"
            self.sp_attn_implementation = os.environ.get(variable) or None
        if self.sp_attn_implementation is not None:
            one_of(self.sp_attn_implementation, _ATTENTIONS, source=source)


@dataclass
class TorchTensorParallelPlugin:
    """``ParallelismConfig(tp_size=…)`` by its older name, for ``Accelerator(torch_tp_plugin=…)``.

    ``torch_device_mesh``: the processes that split layers, set by the `Accelerator`.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.torch_device_mesh is not None:
            raise ArgumentError(
                "TorchTensorParallelPlugin(torch_device_mesh=…): an Accelerator creates the mesh: pass tp_size only"
            )


# The class of each handler, by the dimension whose settings it has.
_HANDLERS = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}


@dataclass(repr=False)
class ParallelismConfig:
    """The number of processes along each dimension; their product is the world size.

    ``dp_replicate_size``: replicas of the model.
    ``dp_shard_size``: processes among which one replica is sharded.
    ``tp_size``: processes that split layers, by the model's ``tp_plan``.
    ``cp_size``: processes that split sequences, in `Accelerator.maybe_context_parallel`; sharding is over them too,
        but not needed (``ACCELERATE_ALLOW_CP_STANDALONE`` is ignored).
    ``sp_size``: the same, and in attention each process has the whole sequence of its part of the heads.

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
        for dimension, kind in _HANDLERS.items():
            name = f"{dimension}_handler"
            if self.sizes[dimension] > 1 and getattr(self, name) is None:
                setattr(self, name, kind())
            handler = getattr(self, name)
            if handler is not None and not isinstance(handler, kind):
                raise ArgumentError(
                    f"ParallelismConfig({name}=…) must be a {kind.__name__}, not {type(handler).__name__}"
                )

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

    def check(self, world: int) -> None:
        """Raise `ArgumentError` for sizes that are impossible together, or do not make up ``world`` processes."""
        if self.cp_enabled and self.sp_enabled:
            raise ArgumentError(
                f"ParallelismConfig(cp_size={self.cp_size}, sp_size={self.sp_size}): both split the sequence: "
                "set one of them"
            )
        if self.total_size != world:
            listing = (
                " × ".join(f"{name}_size={size}" for name, size in self.sizes.items() if size > 1) or "all sizes 1"
            )
            raise ArgumentError(
                f"ParallelismConfig: {listing} is {self.total_size}, but this world has {world} processes"
            )

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return a new mesh over the world, with all dimensions; None in a world of one.

        All processes must call it. Raises `ArgumentError` if the product of the sizes is not the world size. An
        `Accelerator` creates its own mesh, and sets the sizes that are left open.
        """
        world = world_from_torch()
        self.check(1 if world is None else world.size)
        return None if world is None or world.size == 1 else new_device_mesh(self.sizes, _FLATTENED, device_type)

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """Return the mesh of the `Accelerator`, or of `build_device_mesh`, which is then kept.

        Raises `ArgumentError` if there is none and no ``device_type``, and for another device type.
        """
        if self.device_mesh is None and device_type is not None:
            self.device_mesh = self.build_device_mesh(device_type)
            return self.device_mesh
        if self.device_mesh is None:
            raise ArgumentError(
                "ParallelismConfig.get_device_mesh: no mesh yet: pass the config to an Accelerator first, or a "
                "device_type"
            )
        if device_type not in (None, self.device_mesh.device_type):
            raise ArgumentError(
                f"ParallelismConfig.get_device_mesh({device_type!r}): the mesh is on {self.device_mesh.device_type}"
            )
        return self.device_mesh

    def to_json(self) -> dict[str, Any]:
        """Return the arguments as a dictionary that JSON can hold."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.init}
        return {name: dict(vars(value)) if hasattr(value, "__dict__") else value for name, value in values.items()}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(self) if entry.init)
        return f"ParallelismConfig({arguments})"
