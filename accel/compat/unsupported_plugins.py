"""Configuration of ways to train that this version of accel does not have, for code that imports it unconditionally.

The classes hold what they are given, so that ``isinstance`` and annotations work; `Accelerator` refuses them in one
line. The functions that would save and load such models raise `ArgumentError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from accel.errors import ArgumentError


@dataclass
class FullyShardedDataParallelPlugin:
    """What fully sharded data parallelism is to be like."""

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None


@dataclass
class DeepSpeedPlugin:
    """What DeepSpeed is to do."""

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: str | None = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None


@dataclass
class ParallelismConfig:
    """Over how many processes each dimension of a device mesh goes; a size that is not given is 1."""

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: Any = None
    cp_handler: Any = None
    sp_handler: Any = None

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether models are replicated."""
        return (self.dp_replicate_size or 1) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether models are sharded over data-parallel processes."""
        return (self.dp_shard_size or 1) > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether tensors are spread."""
        return (self.tp_size or 1) > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are spread, by context parallelism."""
        return (self.cp_size or 1) > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are spread, by sequence parallelism."""
        return (self.sp_size or 1) > 1

    @property
    def data_parallel_size(self) -> int:
        """Processes that see different data."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that see the same data."""
        return (self.tp_size or 1) * (self.cp_size or 1) * (self.sp_size or 1)

    @property
    def total_size(self) -> int:
        """Processes in all."""
        return self.data_parallel_size * self.non_data_parallel_size


def _refuse(what: str = "fully sharded data parallelism") -> NoReturn:
    raise ArgumentError(f"{what} is not in this version of accel: see docs/migrating.md")


class _DeepSpeeds:
    """What stands for a part of DeepSpeed: there to be imported and asked about, not to be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("DeepSpeed")


class HfDeepSpeedConfig(_DeepSpeeds):
    """DeepSpeed's configuration. Raises `ArgumentError` when it is made."""


class DummyOptim(_DeepSpeeds):
    """Stands for the optimizer of a DeepSpeed configuration. Raises `ArgumentError` when it is made."""


class DummyScheduler(_DeepSpeeds):
    """Stands for the scheduler of a DeepSpeed configuration. Raises `ArgumentError` when it is made."""


class DeepSpeedSchedulerWrapper(_DeepSpeeds):
    """A scheduler that a DeepSpeed engine steps. Raises `ArgumentError` when it is made."""


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    output_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Raise `ArgumentError`."""
    _refuse()


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: Any,
    input_dir: Any,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Raise `ArgumentError`."""
    _refuse()


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    output_dir: Any,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Raise `ArgumentError`."""
    _refuse()


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: Any,
    input_dir: Any,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Raise `ArgumentError`."""
    _refuse()
