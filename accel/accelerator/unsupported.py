"""The part of `Accelerator` that answers for ways to spread and compute a model which this version does not have.

Every run is data-parallel: of any other dimension there is one, and this process is the first in it.
"""

from __future__ import annotations

from typing import Any

from accel.accelerator.run import Part
from accel.enums import FP8BackendType


class Dimensions(Part):
    """Properties that Accelerate's `Accelerator` has, with the answers that hold for a data-parallel run."""

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
    def parallelism_config(self) -> None:
        """``None``: no dimension but data."""
        return

    @property
    def torch_device_mesh(self) -> None:
        """``None``: no dimension but data."""
        return

    @property
    def is_fsdp2(self) -> bool:
        """``False``: models are whole on every process."""
        return False

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """``False``: models are whole on every process."""
        return False

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
        """This process's rank among those with different data."""
        return self.strategy.data_place[1]

    @property
    def data_parallel_shard_rank(self) -> int:
        """0: models are whole on every process."""
        return 0

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
