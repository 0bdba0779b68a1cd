"""The part of `Accelerator` between a data loader and an optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel.accelerator.run import Part
from accel.data.loader import PreparedLoader
from accel.data.prepare import prepare_data_loader, skip_first_batches
from accel.errors import ArgumentError, StateError
from accel.parallel import sync_in_backward
from accel.parallel.context import split_sequences
from accel.parallel.parts import Gathered, Ulysses
from accel.parallel.ring import Ring
from accel.parallel.unwrap import extract_model_from_parallel
from accel.plugins import AutocastKwargs, DataLoaderConfiguration
from accel.precision.amp import LowPrecision
from accel.training.accumulation import Accumulation
from accel.training.optimizer import AcceleratedOptimizer

# Data loaders.


class LoadingControl(Part):
    """Preparation of data loaders according to `DataLoaderConfiguration`."""

    dataloader_config: DataLoaderConfiguration
    device_placement: bool
    rng_types: Sequence[str] | None

    @property
    def split_batches(self) -> bool:
        """True if a loader's batch size is the total of all processes."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if the main process reads for all; ``None``: for iterable data sets only."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if an incomplete last round is completed."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """True if shuffling depends on seed and epoch only."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if loaders resume their position after `load_state`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """True if copies to the device are asynchronous."""
        return self.dataloader_config.non_blocking

    def prepare_data_loader(
        self,
        data_loader: DataLoader[Any],
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable[..., Any] | None = None,
    ) -> DataLoader[Any]:
        """Return ``data_loader`` limited to this process's share; see `accel.data.prepare_data_loader`."""
        config = self.dataloader_config
        device: torch.device = self.state.device
        prepared = prepare_data_loader(
            self.strategy.adapt_loader(data_loader),
            device,
            *self.strategy.data_place,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            dispatch_batches=config.dispatch_batches,
            even_batches=config.even_batches,
            slice_fn_for_dispatch=slice_fn_for_dispatch,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
            already_sharded=config.already_sharded,
            torch_device_mesh=self.state.device_mesh,
            copies=self.strategy.copies,
        )
        if all(candidate is not prepared for candidate in self._run.loaders):
            self._run.loaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """See `accel.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)


# Between a batch and an optimizer step: accumulation, gradients, precision, unwrapping.


class TrainingControl(Part):
    """Accumulation, backward passes and clipping, delegated to the run's strategy, precision and window."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; ``None`` without fp16. A script may set its own, or none."""
        return self.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.precision.finish_pending()
        self.precision.scaler = scaler

    @property
    def native_amp(self) -> bool:
        """True if models compute under autocast."""
        return isinstance(self.precision, LowPrecision)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches per optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ArgumentError(f"gradient accumulation steps must be a positive integer, got {steps!r}")
        self.gradient_state.plugin.num_steps = steps

    @property
    def sync_gradients(self) -> bool:
        """True if the current batch ends its accumulation window."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def step(self) -> int:
        """Batches counted in accumulation windows since a loader last ended."""
        return self._run.window.step

    @step.setter
    def step(self, step: int) -> None:
        self._run.window.resume(step)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if any prepared optimizer skipped its last step because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._run.optimizers)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager for one batch of ``models``.

        Unless the batch ends a window, optimizers do not step and gradients are not synchronized.
        """
        return Accumulation(self._run.window, self.strategy, models)

    def no_sync(self, model: torch.nn.Module | Sequence[torch.nn.Module]) -> AbstractContextManager[Any]:
        """Return a context manager whose backward passes do not synchronize ``model``, or several models."""
        return (
            self.strategy.no_sync(model)
            if isinstance(model, torch.nn.Module)
            else _enter_all(self.strategy.no_sync, model)
        )

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context manager whose backward passes synchronize ``model`` after a forward under `no_sync`."""
        return sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Let processes run out of batches at different times in the block, on every kind of device.

        ``even_batches`` overrides that setting of every prepared loader in the block. Warns if the block has no
        effect because models are not data-parallel.
        """
        if self.state.use_distributed and not self.strategy.joins:
            warnings.warn("join_uneven_inputs has no effect: it is for data-parallel training (DDP)", stacklevel=3)
        previous = [(item, item.even_batches) for item in self._run.loaders if isinstance(item, PreparedLoader)]
        for loader, even in previous:
            loader.even_batches = even if even_batches is None else even_batches
        try:
            with self.strategy.uneven_inputs(joinables):
                yield
        finally:
            for loader, even in previous:
                loader.even_batches = even

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that runs operations in mixed precision; prepared models need none.

        ``autocast_handler`` replaces the one given to this `Accelerator`: with ``enabled=False`` the block is fp32.
        """
        return self.precision.autocast(autocast_handler)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``, divided by the number of batches in an accumulation window.

        That is the number in the current window within `accumulate`, and `gradient_accumulation_steps` elsewhere.
        ``kwargs`` are those of `torch.Tensor.backward`. Raises `ArgumentError` for a ``learning_rate``.
        """
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
        length = self._run.window.length
        self.strategy.backward(loss, length, self.sync_gradients, self.precision, **kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raise `ArgumentError`: this version has no LOMO optimizers, which step inside the backward pass."""
        raise ArgumentError(
            "backward(learning_rate=…) is for LOMO optimizers, which are not in this version of accel: leave it out"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the fp16 loss scale, for one optimizer, several, or by default all prepared ones."""
        if optimizer is None:
            optimizer = self._run.optimizers
        for item in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            inner = item.optimizer if isinstance(item, AcceleratedOptimizer) else item
            with self.strategy.split_groups(inner):
                self.precision.unscale(inner)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients in place to a joint ``norm_type`` norm of at most ``max_norm``; return the norm before.

        Call it where gradients are complete: when `sync_gradients` is true.
        """
        self._unscale_to_clip("clip_grad_norm_")
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip gradient elements to ``[-clip_value, clip_value]``, in place, where gradients are complete."""
        self._unscale_to_clip("clip_grad_value_")
        self.strategy.clip_grad_value(parameters, clip_value)

    def _unscale_to_clip(self, name: str) -> None:
        if self.precision.scaler is None:
            return
        if not self.sync_gradients:
            raise StateError(
                f"{name} in the middle of an accumulation window: put it under `if accelerator.sync_gradients:`"
            )
        self.unscale_gradients()

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the original model inside a prepared ``model``, which keeps working.

        Without ``keep_fp32_wrapper`` the model's forward no longer runs in mixed precision; without
        ``keep_torch_compile`` the model before compilation is returned.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return True if ``model``, or a part of it, is dispatched over more than one device."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context manager that cuts ``buffers`` to this process's part, with ``cp_size`` or ``sp_size`` > 1.

        ``buffer_seq_dims``: the dimension of the sequence in each. ``no_restore_buffers`` stay cut afterwards.
        Attention in the block is to the whole sequence: call the model and `backward` in it.
        """
        mesh, config = self.state.device_mesh, self.state.parallelism_config
        if mesh is None or config is None or not (config.cp_enabled or config.sp_enabled):
            return nullcontext()
        by_ring = config.cp_enabled and config.cp_handler.cp_comm_strategy == "alltoall"
        kind = Ring if by_ring else Gathered
        region = kind(mesh["cp"]) if config.cp_enabled else Ulysses(mesh["sp"])
        return split_sequences(region, self._run.models, buffers or (), buffer_seq_dims or (), no_restore_buffers or ())


@contextmanager
def _enter_all(
    region: Callable[[torch.nn.Module], AbstractContextManager[Any]], models: Iterable[torch.nn.Module]
) -> Iterator[None]:
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(region(model))
        yield
