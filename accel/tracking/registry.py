"""The registry of trackers: known ones, available ones, and the selection by ``Accelerator(log_with=…)``."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from accel.enums import LoggerType
from accel.errors import ArgumentError, nearest
from accel.tracking.aim import AimTracker
from accel.tracking.base import GeneralTracker
from accel.tracking.clearml import ClearMLTracker
from accel.tracking.comet_ml import CometMLTracker
from accel.tracking.dvclive import DVCLiveTracker
from accel.tracking.jsonl import JSONLTracker
from accel.tracking.mlflow import MLflowTracker
from accel.tracking.swanlab import SwanLabTracker
from accel.tracking.tensorboard import TensorBoardTracker
from accel.tracking.trackio import TrackioTracker
from accel.tracking.wandb import WandBTracker

logger = logging.getLogger(__name__)

Choice = LoggerType | str | GeneralTracker | type[GeneralTracker]

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    "aim": AimTracker,
    "comet_ml": CometMLTracker,
    "mlflow": MLflowTracker,
    "tensorboard": TensorBoardTracker,
    "wandb": WandBTracker,
    "clearml": ClearMLTracker,
    "dvclive": DVCLiveTracker,
    "swanlab": SwanLabTracker,
    "trackio": TrackioTracker,
    "jsonl": JSONLTracker,
}


@dataclass(frozen=True)
class _Needs:
    """The packages of a tracker, which needs any one of them; messages name the first."""

    packages: tuple[str, ...] = ()

    def met(self) -> bool:
        return not self.packages or any(_installed(package) for package in self.packages)


_NEEDS = {
    LoggerType.TENSORBOARD: _Needs(("tensorboard", "tensorboardX")),
    LoggerType.WANDB: _Needs(("wandb",)),
    LoggerType.COMETML: _Needs(("comet_ml",)),
    LoggerType.AIM: _Needs(("aim",)),
    LoggerType.MLFLOW: _Needs(("mlflow",)),
    LoggerType.CLEARML: _Needs(("clearml",)),
    LoggerType.DVCLIVE: _Needs(("dvclive",)),
    LoggerType.SWANLAB: _Needs(("swanlab",)),
    LoggerType.TRACKIO: _Needs(("trackio",)),
    LoggerType.JSONL: _Needs(),
}


@cache
def _installed(package: str) -> bool:
    spec = find_spec(package)
    # A folder of that name on sys.path, such as the wandb/ of a run, has a spec without an origin.
    return spec is not None and spec.origin is not None


def get_available_trackers() -> list[LoggerType]:
    """Return the trackers whose package is installed, without importing it."""
    return [kind for kind, requirement in _NEEDS.items() if requirement.met()]


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Register ``tracker_class`` by its ``name`` for ``log_with``, in this process.

    It is called with the project's name, then the logging directory if it ``requires_logging_directory``, and its
    part of ``init_kwargs``. Replaces a class of the same name, with a warning. Raises `ArgumentError` for
    anything but a subclass of `GeneralTracker` with both attributes.
    """
    _check_class(tracker_class, "register_tracker_class")
    name = str(tracker_class.name)  # type: ignore[attr-defined]
    if name in LOGGER_TYPE_TO_CLASS:
        warnings.warn(f"tracker {name!r} is replaced by {tracker_class.__name__}", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class


def _check_class(tracker_class: Any, source: str) -> None:
    if not (isinstance(tracker_class, type) and issubclass(tracker_class, GeneralTracker)):
        raise ArgumentError(f"{source} takes a subclass of GeneralTracker, got {tracker_class!r}")
    if not isinstance(getattr(tracker_class, "name", None), str) or not tracker_class.name:  # type: ignore[attr-defined]
        raise ArgumentError(f"{source}: {tracker_class.__name__} lacks the class attribute name, a str")
    if not hasattr(tracker_class, "requires_logging_directory"):
        raise ArgumentError(
            f"{source}: {tracker_class.__name__} lacks the class attribute requires_logging_directory, True or False"
        )


def filter_trackers(
    log_with: Choice | Iterable[Choice] | None, logging_dir: str | os.PathLike[str] | None = None
) -> list[Choice]:
    """Return the trackers in ``log_with``, each once: names as `LoggerType` or text, instances and classes as given.

    ``"all"`` selects every available one; without ``logging_dir``, those that need it are skipped with a
    warning. Raises `ArgumentError` for an unknown name, a package that is not installed, and a named tracker that
    needs a directory if ``logging_dir`` is missing.
    """
    if log_with is None:
        return []
    selectors = list(log_with) if isinstance(log_with, (list, tuple, set, frozenset)) else [log_with]
    chosen: list[Choice] = []
    for selector in selectors:
        for choice in _all(logging_dir) if _is_all(selector) else [_check_choice(selector, logging_dir)]:
            if not any(choice is previous or (isinstance(choice, str) and choice == previous) for previous in chosen):
                chosen.append(choice)
    return chosen


def name_of(choice: Choice) -> str:
    """Return the name of a result of `filter_trackers`."""
    return str(choice) if isinstance(choice, str) else str(choice.name)  # type: ignore[union-attr]


def _is_all(selector: Any) -> bool:
    return isinstance(selector, str) and str(selector) == LoggerType.ALL.value


def _all(logging_dir: str | os.PathLike[str] | None) -> list[Choice]:
    kinds: list[Choice] = []
    skipped: list[str] = []
    for kind in get_available_trackers():
        if logging_dir is None and LOGGER_TYPE_TO_CLASS[kind.value].requires_logging_directory:  # type: ignore[attr-defined]
            skipped.append(kind.value)
        else:
            kinds.append(kind)
    if skipped:
        logger.warning("log_with='all' skips %s: pass project_dir or logging_dir to use it", ", ".join(skipped))
    return kinds


def _check_choice(selector: Any, logging_dir: str | os.PathLike[str] | None) -> Choice:
    if isinstance(selector, GeneralTracker):
        return selector
    if isinstance(selector, type):
        _check_class(selector, "log_with")
        kind: type[GeneralTracker] = selector
        choice: Choice = selector
    else:
        choice = _tracker_by_name(selector)
        kind = LOGGER_TYPE_TO_CLASS[str(choice)]
    name = name_of(choice)
    if kind.requires_logging_directory and logging_dir is None:  # type: ignore[attr-defined]
        raise ArgumentError(
            f"log_with={name!r} needs a directory: pass Accelerator(project_dir=…) or "
            "ProjectConfiguration(logging_dir=…)"
        )
    return choice


def _tracker_by_name(selector: Any) -> LoggerType | str:
    name = str(selector) if isinstance(selector, str) else None
    if name is None or name not in LOGGER_TYPE_TO_CLASS:
        known = [*LOGGER_TYPE_TO_CLASS, LoggerType.ALL.value]
        description = repr(name) if name is not None else f"{selector!r} ({type(selector).__name__})"
        raise ArgumentError(f"log_with={description} is not one of {', '.join(known)}{nearest(str(selector), known)}")
    if name not in LoggerType.list():
        return name
    kind = LoggerType(name)
    requirement = _NEEDS[kind]
    is_builtin = LOGGER_TYPE_TO_CLASS[name].__module__.startswith(__package__ or "")
    if is_builtin and not requirement.met():
        package = requirement.packages[0]
        raise ArgumentError(f"log_with={name!r} needs the package {package}, which is missing: pip install {package}")
    return kind
