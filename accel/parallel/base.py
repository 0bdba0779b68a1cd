"""What a strategy may override."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from accel import collectives
from accel.parallel.unwrap import bare
from accel.state import PartialState


class Strategy:
    """Leaves the model as it is; each method is the plain way to do its thing on whole parameters."""

    joins: ClassVar[bool] = False  # whether `uneven_inputs` has an effect
    compiles_in_place: ClassVar[bool] = False  # whether modules must stay the objects that they are
    spreads: ClassVar[bool] = False  # whether each process has a share of every model
    saves_held_back: ClassVar[bool] = True  # whether gradients that wait for their window's end can be saved

    def __init__(self, state: PartialState) -> None:
        self.state = state

    @property
    def data_place(self) -> tuple[int, int]:
        """How many shares the data is in, and which of them this process sees."""
        return self.state.num_processes, self.state.process_index

    def gather(self, tensors: Any) -> Any:
        """See `accel.collectives.gather`: what the processes with different data have, in the order of the shares."""
        return collectives.gather(tensors)

    def gather_objects(self, items: Any) -> Any:
        """See `accel.collectives.gather_object`, likewise."""
        return collectives.gather_object(items)

    def place(self, model: torch.nn.Module, evaluation: bool = False) -> torch.nn.Module:
        """Move ``model`` to this process's device; ``evaluation``: it is not going to be given to `prepare`."""
        return model.to(self.state.device)

    def prepare(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
        """Return ``models``, placed already, as to be called in training, and optimizers that step their parameters.

        One for one. Either may come in a later call than what it belongs to, or be empty.
        """
        return [self.wrap(model) for model in models], list(optimizers)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model``, on its device already, as the thing to call in training."""
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the script's own model: what is inside wrappers and compilations, whose names no prefix changes."""
        return bare(model)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A region whose backward passes leave gradients on their process."""
        return nullcontext()

    def after_backward(self) -> None:
        """Exchange the gradients that a backward pass has left, where passes do not do that themselves."""

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """A region in which processes may have different numbers of batches."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients in place so that their joint norm is at most ``max_norm``; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each gradient element to ``[-clip_value, clip_value]``, in place."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def settle(self) -> None:
        """Have every model's ``parameters()`` be what optimizers step, whatever its last pass has left."""

    @property
    def keeps_shards(self) -> bool:
        """Whether checkpoints hold what each process has; otherwise whole models and optimizers."""
        return False

    def model_state(self, model: torch.nn.Module, whole: bool = True) -> dict[str, torch.Tensor]:
        """The state dict of ``model``, by the names it has unwrapped; shares memory with it if it can.

        whole: with tensors that are whole on the main process of each node; otherwise with what each process has.
        """
        state: dict[str, torch.Tensor] = self.on_host(self.unwrap(model).state_dict())
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state dict of ``optimizer``, whole on the main process of each node."""
        state: dict[str, Any] = self.on_host(optimizer.state_dict())
        return state

    def on_host(self, value: Any) -> Any:
        """``value`` as it can be written to a file: with tensors that have an address."""
        return value
