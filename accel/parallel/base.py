"""`Strategy`, the base class of all strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.utils.data import DataLoader

from accel import collectives
from accel.errors import ArgumentError
from accel.parallel.mesh import Mesh
from accel.parallel.unwrap import unwrap
from accel.plugins.deepspeed import DummyOptim, DummyScheduler
from accel.precision.base import Precision
from accel.pytree import collect, map_nested
from accel.state import PartialState


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The batches of prepared loaders: this process's batch sizes, and whether they are shares of a larger batch."""

    batch_sizes: Sequence[int] = ()
    split_batches: bool = False


class Prepared(NamedTuple):
    """The results of `Strategy.prepare`, in the order of its arguments."""

    models: list[torch.nn.Module]
    optimizers: list[Any]
    schedulers: list[Any]


class Strategy:
    """The base strategy: models stay as they are, and methods work on full parameters."""

    joins: ClassVar[bool] = False  # True if `uneven_inputs` has an effect
    lockstep: ClassVar[str] = ""  # the kind of training in which a process without batches would keep others waiting
    compiles_in_place: ClassVar[bool] = False  # True if modules must stay the same objects
    shards_models: ClassVar[bool] = False  # True if each process has a shard of every model
    is_engine: ClassVar[bool] = False  # True if a library casts models, scales losses, clips and steps itself

    max_norm: float = 0.0  # to which `step` clips gradients, unless 0
    engine: Any = None  # that of a library which trains the model, if there is one

    def __init__(self, state: PartialState, mesh: Mesh | None = None) -> None:
        self.state = state
        self.mesh = mesh

    @property
    def data_place(self) -> tuple[int, int]:
        """The number of data shares, and the index of this process's share."""
        return (self.state.num_processes, self.state.process_index) if self.mesh is None else self.mesh.data_place

    @property
    def batches_at_once(self) -> int:
        """The number of loaders' batches that all processes together train on in a step without accumulation."""
        return self.data_place[0]

    @property
    def copies(self) -> int:
        """The number of processes with the same data: as many as follow one another in rank order."""
        return self.state.num_processes // self.data_place[0]

    def gather(self, tensors: Any) -> Any:
        """Gather from the processes with different data, in the order of the shares; see `accel.collectives.gather`.

        Processes with parts of the same sequences have different losses: of numbers per row the result has the means,
        and of single numbers those of every part.
        """
        gathered = collectives.gather(tensors)
        if self.copies == 1:
            return gathered
        leaves: list[torch.Tensor] = []
        collect(tensors, leaves)
        dimensions = iter([leaf.ndim for leaf in leaves])
        return map_nested(lambda rows: self._one_of_each_share(rows, next(dimensions)), gathered)

    def _one_of_each_share(self, rows: torch.Tensor, dimensions: int) -> torch.Tensor:
        parts, copies = rows.chunk(self.state.num_processes), self.copies
        step = copies if self.mesh is None else self.mesh.sizes["tp"]
        if not len(rows):
            return rows
        if dimensions == 0:
            return torch.cat(parts[::step])
        if step == copies or dimensions > 1 or not rows.is_floating_point():
            return torch.cat(parts[::copies])
        shares = (parts[start : start + copies : step] for start in range(0, len(parts), copies))
        return torch.cat([torch.stack(own_parts).mean(0) for own_parts in shares])

    def gather_objects(self, items: Any) -> Any:
        """Gather objects as `gather` does tensors; see `accel.collectives.gather_object`."""
        return collectives.gather_object([] if self.state.process_index % self.copies else items)

    def split_loader(self, loader: Any) -> Any:
        """Return a prepared ``loader`` of whole sequences as `prepare` does with a model in the same call."""
        return loader

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader to prepare in place of the script's ``loader``."""
        return loader

    def place(self, model: torch.nn.Module, evaluation: bool = False) -> torch.nn.Module:
        """Move ``model`` to this process's device; ``evaluation``: `prepare` will not be called with it."""
        return model.to(self.state.device)

    def prepare(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        loading: Loading | None = None,
    ) -> Prepared:
        """Return ``models``, placed already, ready for training, and optimizers that step their parameters.

        Results are in the order of the arguments. A model and its optimizer may come in different calls; any list may
        be empty. ``loading``: the batches that the models will get, for engines that must know.

        Raises `ArgumentError` for a placeholder of an engine's optimizer or scheduler.
        """
        for item in (*optimizers, *schedulers):
            if isinstance(item, (DummyOptim, DummyScheduler)):
                raise ArgumentError(
                    f"prepare: a {type(item).__name__} stands for a part of {item.engine}'s configuration, and this "
                    f"run does not use {item.engine}: pass {item.plugin}=…, or torch's own class"
                )
        for model in models:
            _copy_overlapping_buffers(model)
        return Prepared([self.wrap(model) for model in models], list(optimizers), list(schedulers))

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return ``model``, which is on its device, as the callable for training."""
        return model

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the script's own model, without wrappers and compilations and their name prefixes."""
        return unwrap(model)

    def model_precision(self, name: str) -> str:
        """Return the precision to prepare models for in a run in ``name``; an engine casts and scales by itself."""
        return "no" if self.is_engine else name

    def needs_autocast(self, model: torch.nn.Module) -> bool:
        """Return True if ``model``, which is to be trained, computes in mixed precision only under autocast."""
        return True

    def split_groups(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[Any]:
        """Return a context manager in which ``optimizer`` can step, and its gradients can be unscaled."""
        return nullcontext()

    def compile(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        """Return ``model``, as `prepare` returned it, compiled as a whole. ``kwargs``: of `torch.compile`."""
        return cast(torch.nn.Module, torch.compile(model, **kwargs))

    def backward(self, loss: torch.Tensor, length: int, last: bool, precision: Precision, **kwargs: Any) -> None:
        """Compute the gradients of ``loss`` divided by ``length``; ``last``: they complete an accumulation window."""
        precision.backward(loss if length == 1 else loss / length, **kwargs)
        if last:
            self.after_backward()

    def step(
        self, optimizer: torch.optim.Optimizer, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool | list[torch.Tensor]:
        """Step ``optimizer`` at the end of a window; return if that was skipped, as `Precision.step` does."""
        with self.split_groups(optimizer):
            if self.max_norm:
                precision.unscale(optimizer)
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                self.clip_grad_norm(parameters, self.max_norm, 2.0)
            return precision.step(optimizer, closure)

    def zero_grad(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        """Clear the gradients of ``optimizer``."""
        optimizer.zero_grad(**kwargs)

    def steps_scheduler(self, scheduler: Any) -> bool:
        """Return True if an engine advances ``scheduler`` when it steps."""
        return False

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager whose backward passes do not synchronize gradients."""
        return nullcontext()

    def after_backward(self) -> None:
        """Synchronize the gradients of a backward pass, if passes do not do it themselves."""

    def uneven_inputs(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which processes may have different numbers of batches.

        Raises `ArgumentError` if processes train in ``lockstep``.
        """
        if self.lockstep:
            raise ArgumentError(
                f"join_uneven_inputs is for DDP: {self.lockstep} all processes must run the same number of batches. "
                "Remove it, and keep even_batches=True"
            )
        return nullcontext()

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip gradients in place to a joint norm of at most ``max_norm``; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each gradient element to ``[-clip_value, clip_value]``, in place."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def finish_pending(self) -> None:
        """Make every model's ``parameters()`` the tensors that optimizers step, regardless of its last pass."""

    def release(self) -> None:
        """Drop the models and what an engine keeps for them."""

    def drop_held_gradients(self) -> None:
        """Drop gradients of an accumulation window that no parameter's ``grad`` shows."""

    def can_save_window(self, sync_each_batch: bool) -> bool:
        """Return True if the gradients of an open accumulation window can be saved; an engine holds them itself."""
        return not self.is_engine

    def shards(self, model: torch.nn.Module) -> bool:
        """Return True if each process has a shard of ``model``, a prepared one."""
        return self.shards_models

    def leaves_out(self, model: torch.nn.Module) -> bool:
        """Return True if checkpoints leave out ``model``, a prepared one."""
        return False

    def saves(self, item: Any) -> bool:
        """Return True if `save_engine` saves ``item``, a prepared model or optimizer."""
        return False

    def save_engine(self, folder: Path, name: str) -> None:
        """Save the engine, a prepared model, and its optimizer into the folder ``name`` of ``folder``. Collective."""

    def load_engine(self, folder: Path, name: str, processes: int) -> None:
        """Load what `save_engine` has saved in a world of ``processes``, or raise `CheckpointError`. Collective."""

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


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average the gradients of ``parameters``, which must have one on all processes or on none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_copy_(gradients, collectives.reduce(gradients, "mean"))


def _copy_overlapping_buffers(model: torch.nn.Module) -> None:
    """Copy buffers whose elements share memory, as the move to a GPU does: they could not be received."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or buffer.layout is not torch.strided:
                continue
            if _may_overlap(buffer):
                module._buffers[name] = buffer.contiguous()


def _may_overlap(tensor: torch.Tensor) -> bool:
    """Return True if elements may share memory, as `expand` and `unfold` make them; False for slices and transposes.

    A dimension must step over all elements of the dimensions with smaller strides.
    """
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False
