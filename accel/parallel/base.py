"""`Strategy`, the base class of all strategies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from accel import collectives
from accel.parallel.unwrap import unwrap
from accel.state import PartialState


class Strategy:
    """The base strategy: models stay as they are, and methods work on full parameters."""

    joins: ClassVar[bool] = False  # True if `uneven_inputs` has an effect
    compiles_in_place: ClassVar[bool] = False  # True if modules must stay the same objects
    shards_models: ClassVar[bool] = False  # True if each process has a shard of every model
    saves_open_window: ClassVar[bool] = True  # True if the gradients of an open accumulation window can be saved

    def __init__(self, state: PartialState) -> None:
        self.state = state

    @property
    def data_place(self) -> tuple[int, int]:
        """The number of data shares, and the index of this process's share."""
        return self.state.num_processes, self.state.process_index

    def gather(self, tensors: Any) -> Any:
        """Gather from the processes with different data, in the order of the shares; see `accel.collectives.gather`."""
        return collectives.gather(tensors)

    def gather_objects(self, items: Any) -> Any:
        """Gather objects as `gather` does tensors; see `accel.collectives.gather_object`."""
        return collectives.gather_object(items)

    def place(self, model: torch.nn.Module, evaluation: bool = False) -> torch.nn.Module:
        """Move ``model`` to this process's device; ``evaluation``: `prepare` will not be called with it."""
        return model.to(self.state.device)

    def prepare(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Return ``models``, placed already, ready for training, and optimizers that step their parameters.

        Results are in the order of the arguments. A model and its optimizer may come in different calls; either list
        may be empty.
        """
        return [self.wrap(model) for model in models], list(optimizers)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model``, which is on its device, as the callable for training."""
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the script's own model, without wrappers and compilations and their name prefixes."""
        return unwrap(model)

    def needs_autocast(self, model: torch.nn.Module) -> bool:
        """Return True if ``model``, which is to be trained, computes in mixed precision only under autocast."""
        return True

    def split_groups(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context manager in which ``optimizer`` can step, and its gradients can be unscaled."""
        return nullcontext()

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager whose backward passes do not synchronize gradients."""
        return nullcontext()

    def after_backward(self) -> None:
        """Synchronize the gradients of a backward pass, if passes do not do it themselves."""

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which processes may have different numbers of batches."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip gradients in place to a joint norm of at most ``max_norm``; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each gradient element to ``[-clip_value, clip_value]``, in place."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def finish_pending(self) -> None:
        """Make every model's ``parameters()`` the tensors that optimizers step, whatever state its last pass left."""

    def drop_held_gradients(self) -> None:
        """Drop gradients of an accumulation window that no parameter's ``grad`` shows."""

    @property
    def own_buffers(self) -> bool:
        """True if each process keeps buffers of its own, which may differ from the others'."""
        return False

    @property
    def keeps_shards(self) -> bool:
        """True if checkpoints hold each process's shards; otherwise full models and optimizers."""
        return False

    def model_state(self, model: torch.nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """Return the state dict of ``model`` under its unwrapped names, sharing its memory if possible.

        ``full``: with full tensors on the main process of each node; otherwise with this process's shards.
        """
        state: dict[str, torch.Tensor] = self.on_host(self.unwrap(model).state_dict())
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state dict of ``optimizer``, in full on the main process of each node."""
        state: dict[str, Any] = self.on_host(optimizer.state_dict())
        return state

    def on_host(self, value: Any) -> Any:
        """Return ``value`` in a form that can be written to a file: with tensors that have an address."""
        return value
