"""Configuration classes of strategies that this version of accel lacks, for unconditional imports.

The classes hold their arguments, so that ``isinstance`` and annotations work; `Accelerator` rejects them with
one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from accel.errors import ArgumentError


@dataclass
class DeepSpeedPlugin:
    """The configuration of DeepSpeed."""

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


def _refuse(feature: str) -> NoReturn:
    raise ArgumentError(f"{feature} is not in this version of accel: see docs/migrating.md")


class _DeepSpeedStub:
    """A placeholder for a part of DeepSpeed: it can be imported and tested for, but not instantiated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse("DeepSpeed")


class HfDeepSpeedConfig(_DeepSpeedStub):
    """DeepSpeed's configuration. Raises `ArgumentError` when instantiated."""


class DummyOptim(_DeepSpeedStub):
    """A placeholder for the optimizer of a DeepSpeed configuration. Raises `ArgumentError` when instantiated."""


class DummyScheduler(_DeepSpeedStub):
    """A placeholder for the scheduler of a DeepSpeed configuration. Raises `ArgumentError` when instantiated."""


class DeepSpeedSchedulerWrapper(_DeepSpeedStub):
    """A scheduler that a DeepSpeed engine steps. Raises `ArgumentError` when instantiated."""
