"""The part of `Accelerator` that tells over which dimensions processes share the work, and this one's place in them.

Of the dimensions that this version does not have there is one, and this process is the first in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.accelerator.run import Part
from accel.enums import FP8BackendType
from accel.plugins.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Dimensions(Part):
    """The mesh of the run, and Accelerate's properties of ways to compute that this version does not have."""

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
        """``None``: no DeepSpeed."""
        return

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The size of every dimension; ``None`` where models are whole and nobody gave a `ParallelismConfig`."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The processes by dimension; ``None`` where they share data alone, and nobody gave a `ParallelismConfig`.

        Its dimensions are ``dp_replicate``, ``dp_shard``, ``cp``, ``sp`` and ``tp``, those of size 1 too, and by
        ``mesh["dp"]`` it answers what several are together: ``dp``, ``dp_shard_cp`` and ``dp_cp``.
        """
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded, which is by FSDP 2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """The same as `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def fp8_backend(self) -> FP8BackendType:
        """``FP8BackendType.NO``."""
        return FP8BackendType.NO

    @property
    def should_save_model(self) -> bool:
        """Whether this process is the one of its node that has a whole model to write: rank 0 of the node."""
        return self.state.is_local_main_process

    @property
    def data_parallel_rank(self) -> int:
        """Which replica of the model this process has, or a share of."""
        return self.strategy.data_place[1] if self.state.device_mesh is None else self._rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """Which of the shards of a replica this process has; 0 where models are whole."""
        return self._rank("dp_shard")

    def _rank(self, dimension: str) -> int:
        mesh = self.state.device_mesh
        return 0 if mesh is None else mesh.get_local_rank(dimension)

    @property
    def tensor_parallel_rank(self) -> int:
        """0: tensors are whole on every process."""
        return 0

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: a model is one stage."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """0: sequences are whole on every process."""
        return 0

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return ``dl``: sequences are whole on every process."""
        return dl
