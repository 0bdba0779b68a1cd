"""The part of `Accelerator` about parallelism dimensions: the device mesh and this process's rank in each.

Dimensions that this version does not have are of size 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.accelerator.run import Part
from accel.enums import FP8BackendType
from accel.plugins.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Dimensions(Part):
    """The device mesh of the run, and Accelerate's properties of features that this version does not have."""

    fp8_enabled = False
    has_fp8_handler = False
    delayed_fp8_autocast = False
    fp8_recipe_handler = None
    ao_recipe_handler = None
    te_recipe_handler = None
    msamp_recipe_handler = None
    has_lomo_optimizer = False
    deepspeed_engine_wrapped = None

    @property
    def deepspeed_plugin(self) -> None:
        """``None``: this version has no DeepSpeed."""
        return

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The size of every dimension; ``None`` without sharding and without a `ParallelismConfig`."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh; ``None`` for data parallelism alone without a `ParallelismConfig`.

        Its dimensions are ``dp_replicate``, ``dp_shard``, ``cp``, ``sp`` and ``tp``, those of size 1 too. Flattened
        dimensions are ``mesh["dp"]``, ``mesh["dp_shard_cp"]`` and ``mesh["dp_cp"]``.
        """
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded, always with FSDP 2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Alias of `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def fp8_backend(self) -> FP8BackendType:
        """``FP8BackendType.NO``: this version has no fp8."""
        return FP8BackendType.NO

    @property
    def should_save_model(self) -> bool:
        """True on rank 0 of a node, which writes the full model."""
        return self.state.is_local_main_process

    @property
    def data_parallel_rank(self) -> int:
        """The index of the model replica that this process holds or shares."""
        return self.strategy.data_place[1] if self.state.device_mesh is None else self._rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this process's shard in its replica; 0 without sharding."""
        return self._rank("dp_shard")

    def _rank(self, dimension: str) -> int:
        mesh = self.state.device_mesh
        return 0 if mesh is None else mesh.get_local_rank(dimension)

    @property
    def tensor_parallel_rank(self) -> int:
        """0: this version has no tensor parallelism."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: this version has no pipeline parallelism."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """0: this version has no context parallelism."""
        return 0

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return ``dl`` unchanged: this version has no sequence parallelism."""
        return dl
