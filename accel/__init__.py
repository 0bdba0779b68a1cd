"""accel: one training script, any cluster.

``import accel`` loads nothing but this table: a public name is imported from its module when it is first asked for, so
that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME_OF = {
    "Accelerator": "accel.accelerator",
    "AccelError": "accel.errors",
    "AcceleratorState": "accel.state",
    "AutocastKwargs": "accel.plugins",
    "DataLoaderConfiguration": "accel.plugins",
    "DistributedDataParallelKwargs": "accel.plugins",
    "DistributedType": "accel.enums",
    "GradScalerKwargs": "accel.plugins",
    "GradientAccumulationPlugin": "accel.plugins",
    "GradientState": "accel.state",
    "InitProcessGroupKwargs": "accel.plugins",
    "Job": "schedulers",
    "JobSpec": "schedulers",
    "LogLine": "schedulers",
    "PartialState": "accel.state",
    "ProjectConfiguration": "accel.plugins",
    "Reason": "schedulers",
    "Resources": "schedulers",
    "Retry": "schedulers",
    "State": "schedulers",
    "Status": "schedulers",
    "get_logger": "accel.logging",
    "set_seed": "accel.random",
    "skip_first_batches": "accel.data",
    "submit": "schedulers",
    "submit_async": "schedulers",
    "synchronize_rng_states": "accel.random",
}

__all__ = [
    "AccelError",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "Job",
    "JobSpec",
    "LogLine",
    "PartialState",
    "ProjectConfiguration",
    "Reason",
    "Resources",
    "Retry",
    "State",
    "Status",
    "get_logger",
    "set_seed",
    "skip_first_batches",
    "submit",
    "submit_async",
    "synchronize_rng_states",
]

if TYPE_CHECKING:
    from accel.accelerator import Accelerator
    from accel.data import skip_first_batches
    from accel.enums import DistributedType
    from accel.errors import AccelError
    from accel.logging import get_logger
    from accel.plugins import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProjectConfiguration,
    )
    from accel.random import set_seed, synchronize_rng_states
    from accel.state import AcceleratorState, GradientState, PartialState
    from schedulers import (
        Job,
        JobSpec,
        LogLine,
        Reason,
        Resources,
        Retry,
        State,
        Status,
        submit,
        submit_async,
    )


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'accel' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
