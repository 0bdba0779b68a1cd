"""`Run`, the state that the parts of `Accelerator` share, and `Part`, their base class."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader

from accel.parallel.base import Strategy
from accel.plugins import ProjectConfiguration
from accel.precision.base import Precision
from accel.state import AcceleratorState, GradientState
from accel.training.accumulation import Window
from accel.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler


@dataclass(kw_only=True)
class Run:
    """The state that all parts share.

    ``registered``: the script's own objects that checkpoints include.
    ``evaluated``: the members of ``models`` that were prepared for evaluation only, and are not distributed.
    """

    state: AcceleratorState
    gradient_state: GradientState
    strategy: Strategy
    precision: Precision
    window: Window
    project: ProjectConfiguration
    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)
    evaluated: WeakSet[torch.nn.Module] = field(default_factory=WeakSet)

    def forget(self) -> None:
        """Drop all prepared and registered objects."""
        self.models, self.optimizers, self.schedulers = [], [], []
        self.loaders, self.registered, self.evaluated = [], [], WeakSet()


def _run_list(name: str) -> Any:
    """Return a property for a list of the run."""

    def replace(part: Part, values: Iterable[Any]) -> None:
        getattr(part._run, name)[:] = values

    return property(lambda part: getattr(part._run, name), replace)


class Part:
    """Base class of the parts of `Accelerator`. They share the run and no other attribute."""

    _run: Run

    @property
    def state(self) -> AcceleratorState:
        """The process's state."""
        return self._run.state

    @state.setter
    def state(self, state: AcceleratorState) -> None:
        self._run.state = state

    @property
    def gradient_state(self) -> GradientState:
        """The process's position in its accumulation window and loaders."""
        return self._run.gradient_state

    @gradient_state.setter
    def gradient_state(self, gradient_state: GradientState) -> None:
        self._run.gradient_state = gradient_state

    @property
    def strategy(self) -> Strategy:
        """The distribution of models over the world."""
        return self._run.strategy

    @strategy.setter
    def strategy(self, strategy: Strategy) -> None:
        self._run.strategy = strategy

    @property
    def precision(self) -> Precision:
        """The precision in which models compute."""
        return self._run.precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self._run.precision = precision

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The directories of the run's files."""
        return self._run.project

    @project_configuration.setter
    def project_configuration(self, project: ProjectConfiguration) -> None:
        self._run.project = project

    # Accelerate's names, which scripts read and set.

    _models = _run_list("models")
    _optimizers = _run_list("optimizers")
    _schedulers = _run_list("schedulers")
    _dataloaders = _run_list("loaders")
    _custom_objects = _run_list("registered")
