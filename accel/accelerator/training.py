"""The part of `Accelerator` between a batch and an optimizer step: accumulation, gradients, precision, unwrapping."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from accel.accelerator.run import Part
from accel.data.loader import PreparedLoader
from accel.errors import ArgumentError, StateError
from accel.parallel import sync_in_backward
from accel.parallel.unwrap import extract_model_from_parallel
from accel.plugins import AutocastKwargs
from accel.precision.amp import LowPrecision
from accel.training.accumulation import Accumulation
from accel.training.optimizer import AcceleratedOptimizer


class TrainingControl(Part):
    """Delegates to the strategy, the precision and the accumulation window of the run."""

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with fp16."""
        return self.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether models compute under autocast."""
        return isinstance(self.precision, LowPrecision)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches to one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or steps < 1:
            raise ArgumentError(f"gradient accumulation steps must be a whole number from 1 on, got {steps!r}")
        self.gradient_state.plugin.num_steps = steps
        self._run.window.length = steps

    @property
    def sync_gradients(self) -> bool:
        """Whether the batch at hand ends its accumulation window."""
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
        """Whether the last step of any prepared optimizer was left out because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._run.optimizers)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """A region for one batch: until it ends a window, optimizers rest and gradients of ``models`` do not travel."""
        return Accumulation(self._run.window, self.strategy, models)

    def no_sync(self, model: torch.nn.Module | Sequence[torch.nn.Module]) -> AbstractContextManager[Any]:
        """A region whose backward passes leave the gradients of ``model``, or of several, on their process."""
        return (
            self.strategy.no_sync(model) if isinstance(model, torch.nn.Module) else _all(self.strategy.no_sync, model)
        )

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[None]:
        """A region whose backward passes exchange the gradients of ``model``, whose forward ran under `no_sync`."""
        return sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A region in which processes may run out of batches at different times, on every kind of device.

        ``even_batches`` stands for that setting of every prepared loader inside the region. Warns where the region has
        no effect: in a world whose models are not data-parallel.
        """
        if self.state.use_distributed and not self.strategy.joins:
            warnings.warn("join_uneven_inputs has no effect: it is for data-parallel training (DDP)", stacklevel=3)
        samplers = [loader if isinstance(loader, PreparedLoader) else None for loader in self._run.loaders]
        kept = [(sampler, sampler.even_batches) for sampler in samplers if sampler is not None]
        for sampler, _ in kept:
            sampler.even_batches = sampler.even_batches if even_batches is None else even_batches
        try:
            with self.strategy.uneven_inputs(joinables):
                yield
        finally:
            for sampler, even in kept:
                sampler.even_batches = even

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A region in which operations run in the mixed precision of this run; prepared models need none.

        ``autocast_handler`` stands for the one given to this `Accelerator`: with ``enabled=False`` the region is fp32.
        """
        return self.precision.autocast(autocast_handler)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``, divided by the number of batches in this accumulation window.

        ``kwargs`` are those of `torch.Tensor.backward`. Raises `ArgumentError` for a ``learning_rate``.
        """
        if "learning_rate" in kwargs:
            self.lomo_backward(loss, kwargs["learning_rate"])
        length = self._run.window.length
        self.precision.backward(loss if length == 1 else loss / length, **kwargs)
        if self.sync_gradients:
            self.strategy.after_backward()

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raises `ArgumentError`: optimizers that step inside the backward pass (LOMO) are not in this version."""
        raise ArgumentError(
            "backward(learning_rate=…) is for LOMO optimizers, which are not in this version of accel: leave it out"
        )

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make gradients those of the loss itself (fp16), for one optimizer, several, or all prepared ones."""
        if optimizer is None:
            optimizer = self._run.optimizers
        for item in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            self.precision.unscale(item.optimizer if isinstance(item, AcceleratedOptimizer) else item)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scale gradients in place so that their joint ``norm_type`` norm is at most ``max_norm``; returns that before.

        To be called where gradients are whole: when `sync_gradients` is true.
        """
        self._unscale_to_clip("clip_grad_norm_")
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Limit each gradient element to ``[-clip_value, clip_value]``, in place, where gradients are whole."""
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
        """Return the model inside what `prepare` returned, which goes on to work as it did.

        Without ``keep_fp32_wrapper`` its forward no longer runs in mixed precision, and without ``keep_torch_compile``
        it is the one that was compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether ``model``, or a part of it, was dispatched over more than one device."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """A region without effect: sequences are not spread over processes in this version."""
        return nullcontext()


@contextmanager
def _all(
    region: Callable[[torch.nn.Module], AbstractContextManager[Any]], models: Iterable[torch.nn.Module]
) -> Iterator[None]:
    with ExitStack() as held:
        for model in models:
            held.enter_context(region(model))
        yield
