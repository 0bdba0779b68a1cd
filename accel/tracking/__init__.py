"""Experiment trackers: one module a tracker, each under the interface of `GeneralTracker`.

A tracker's package is imported only when that tracker starts; names here are imported at their first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_HOME_OF = {
    "LOGGER_TYPE_TO_CLASS": "registry",
    "AimTracker": "aim",
    "ClearMLTracker": "clearml",
    "CometMLTracker": "comet_ml",
    "DVCLiveTracker": "dvclive",
    "GeneralTracker": "base",
    "JSONLTracker": "jsonl",
    "MLflowTracker": "mlflow",
    "SwanLabTracker": "swanlab",
    "TensorBoardTracker": "tensorboard",
    "TrackioTracker": "trackio",
    "WandBTracker": "wandb",
    "filter_trackers": "registry",
    "get_available_trackers": "registry",
    "on_main_process": "base",
    "read_history": "jsonl",
    "read_records": "jsonl",
    "register_tracker_class": "registry",
}

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "GeneralTracker",
    "JSONLTracker",
    "MLflowTracker",
    "SwanLabTracker",
    "TensorBoardTracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "on_main_process",
    "read_history",
    "read_records",
    "register_tracker_class",
]

if TYPE_CHECKING:
    from accel.tracking.aim import AimTracker
    from accel.tracking.base import GeneralTracker, on_main_process
    from accel.tracking.clearml import ClearMLTracker
    from accel.tracking.comet_ml import CometMLTracker
    from accel.tracking.dvclive import DVCLiveTracker
    from accel.tracking.jsonl import JSONLTracker, read_history, read_records
    from accel.tracking.mlflow import MLflowTracker
    from accel.tracking.registry import (
        LOGGER_TYPE_TO_CLASS,
        filter_trackers,
        get_available_trackers,
        register_tracker_class,
    )
    from accel.tracking.swanlab import SwanLabTracker
    from accel.tracking.tensorboard import TensorBoardTracker
    from accel.tracking.trackio import TrackioTracker
    from accel.tracking.wandb import WandBTracker


def __getattr__(name: str) -> object:
    module_name = _HOME_OF.get(name)
    if module_name is None:
        raise AttributeError(f"module 'accel.tracking' has no attribute {name!r}")
    value: object = getattr(import_module(f"accel.tracking.{module_name}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
