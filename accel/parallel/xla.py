"""Data parallel under torch_xla: every process has the full model; gradients are averaged after each backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel.collectives.operations import recursively_apply
from accel.parallel.base import Loading, Prepared, Strategy
from accel.state import PartialState
from accel.world import xla


class Xla(Strategy):
    """The model without a wrapper: torch_xla records and compiles what runs, including collectives."""

    def __init__(self, state: PartialState) -> None:
        super().__init__(state)
        self._models: weakref.WeakKeyDictionary[torch.nn.Module, None] = (
            weakref.WeakKeyDictionary()
        )  # one order for all
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._no_sync_depth = 0
        # The parameter that a model had before it was moved to the device → its parameter there.
        self._device_parameters: Any = WeakIdKeyDictionary()

    def place(self, model: torch.nn.Module, evaluation: bool = False) -> torch.nn.Module:
        """Move ``model`` to the device, where torch creates new parameters; tied ones stay tied."""
        parameters = [(module, name, parameter) for module, name, parameter in _parameters(model)]
        model = model.to(self.state.device)
        for module, name, parameter in parameters:
            replacement = self._device_parameters.setdefault(parameter, module._parameters[name])
            if replacement is not parameter:
                module._parameters[name] = replacement
        return model

    def prepare(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        loading: Loading | None = None,
    ) -> Prepared:
        """See `Strategy.prepare`; optimizers step the parameters on the device, and keep their state."""
        self._optimizers.update(optimizers)
        for optimizer in self._optimizers:
            self._rebind(optimizer)
        return super().prepare(models, optimizers, schedulers)

    def _rebind(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._device_parameters.get(parameter, parameter) for parameter in group["params"]]
        for parameter in list(optimizer.state):
            replacement = self._device_parameters.get(parameter, parameter)
            if replacement is not parameter:
                optimizer.state[replacement] = optimizer.state.pop(parameter)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Broadcast the main process's weights, and register ``model`` for averaging its gradients."""
        if model not in self._models:
            if self.state.use_distributed and any(parameter.requires_grad for parameter in model.parameters()):
                xla.broadcast_parameters(model)
            self._models[model] = None
        return model

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager whose backward passes do not synchronize gradients."""
        return self._without_sync()

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def after_backward(self) -> None:
        """Average the gradients of all wrapped models over the processes, including those of earlier batches."""
        if self._no_sync_depth or not self.state.use_distributed:
            return
        grad_by_id = {id(parameter): parameter.grad for model in self._models for parameter in model.parameters()}
        gradients = [gradient for gradient in grad_by_id.values() if gradient is not None]
        if gradients:
            xla.average(gradients, self.state.num_processes)

    def on_host(self, value: Any) -> Any:
        """Return ``value`` with its tensors in host memory: on the device they lack the address that files need."""
        xla.sync()
        return recursively_apply(lambda tensor: tensor.detach().cpu(), value)


def _parameters(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter
