"""`Accelerator`, the one object a training script holds.

A façade: which process this is lies in `accel.state`, how the model is spread in `accel.parallel`, in which precision
it computes in `accel.precision`, which data it sees in `accel.data`, what processes say to each other in
`accel.collectives`, and what is kept on disk in `accel.checkpoint`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from accel.arguments import accumulation, by_type, loading, project, refuse_environment, refuse_unbuilt, refuse_unknown
from accel.checkpoint import CheckpointControl
from accel.data.loader import skip_first_batches
from accel.data.prepare import prepare_data_loader
from accel.errors import ArgumentError, StateError
from accel.optimizer import AcceleratedOptimizer
from accel.parallel import choose_strategy
from accel.parallel.unwrapping import unwrap
from accel.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
)
from accel.precision import choose_precision
from accel.processes import ProcessControl
from accel.scheduler import AcceleratedScheduler
from accel.state import AcceleratorState, GradientState
from accel.stepping import Accumulation, Window

Handler = TypeVar("Handler", bound=KwargsHandler)


class Accelerator(ProcessControl, CheckpointControl):
    """Trains the same script on one process or many.

    ``mixed_precision``: ``"no"``, ``"bf16"`` or ``"fp16"``; without it ``ACCELERATE_MIXED_PRECISION``.
    ``gradient_accumulation_steps``: batches to one optimizer step; at 1, ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``
    counts, and a ``gradient_accumulation_plugin`` stands for both. ``device_placement``: models and batches are put
    on `device`. ``rng_types``: which generators are made equal on all processes when an epoch begins.
    ``kwargs_handlers``: at most one each of `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs` and
    `InitProcessGroupKwargs`.

    Raises `WorldError` where the environment speaks of several processes that cannot form one world, `PrecisionError`
    where the device lacks the precision, and `ArgumentError` for any other argument that cannot be used.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        **others: Any,
    ) -> None:
        refuse_unknown(others, Accelerator.__init__.__annotations__)
        refuse_unbuilt(
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            torch_tp_plugin=torch_tp_plugin,
        )
        refuse_environment(os.environ)
        handlers = by_type(kwargs_handlers or ())
        self.device_placement = device_placement
        self.rng_types = rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.autocast_handler = handlers.get(AutocastKwargs)
        self.ddp_handler = handlers.get(DistributedDataParallelKwargs)
        self.scaler_handler = handlers.get(GradScalerKwargs)
        self.init_handler = handlers.get(InitProcessGroupKwargs)
        self.dataloader_config = loading(dataloader_config, split_batches)
        self.project_configuration = project(project_config, project_dir)
        self.state = AcceleratorState(
            mixed_precision, cpu, **(self.init_handler.to_kwargs() if self.init_handler else {})
        )
        self.gradient_state = GradientState(accumulation(gradient_accumulation_plugin, gradient_accumulation_steps))
        self.strategy = choose_strategy(self.state, self.ddp_handler)
        self.precision = choose_precision(self.mixed_precision, self.device, self.autocast_handler, self.scaler_handler)
        self._window = Window(self.gradient_state)
        self._forget()
        self._init_checkpoints()

    def _forget(self) -> None:
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoader[Any]] = []
        self._custom_objects: list[Any] = []

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, with fp16."""
        return self.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether models compute under autocast."""
        return self.mixed_precision != "no"

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all processes together."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether incomplete last rounds are completed."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config.even_batches = even_batches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffling depends on seed and epoch alone."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders go on by themselves after `load_state`."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether copies to the device do not wait."""
        return self.dataloader_config.non_blocking

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches to one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.plugin.num_steps = steps
        self._window.length = steps

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
        return self._window.step

    @step.setter
    def step(self, step: int) -> None:
        self._window.resume(step)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any prepared optimizer was left out because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Return models, optimizers, data loaders and schedulers, in the order given, ready for this world.

        Anything else, ``None`` included, and what is prepared already comes back as it is. ``device_placement`` says
        for each whether it is put on `device`.
        """
        places = list(device_placement) if device_placement is not None else [None] * len(args)
        if len(places) != len(args):
            raise ArgumentError(f"prepare(device_placement=…) has {len(places)} values for {len(args)} objects")
        ready = [self._prepare_one(item, place) for item, place in zip(args, places, strict=True)]
        # Schedulers come last: each is joined to the prepared optimizer that holds its own.
        ready = [self.prepare_scheduler(item) if _is_scheduler(item) else item for item in ready]
        return ready[0] if len(ready) == 1 else tuple(ready)

    def _prepare_one(self, item: Any, place: bool | None) -> Any:
        if isinstance(item, torch.nn.Module):
            return self.prepare_model(item, device_placement=place)
        if isinstance(item, torch.optim.Optimizer):
            return self.prepare_optimizer(item, device_placement=place)
        if isinstance(item, DataLoader):
            return self.prepare_data_loader(item, device_placement=place)
        return item

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` on its device, in its precision and, but for ``evaluation_mode``, spread over the world."""
        if any(known is model for known in self._models):
            return model
        if self.device_placement if device_placement is None else device_placement:
            model = model.to(self.device)
        self.precision.wrap_forward(model)
        if not evaluation_mode:
            model = self.strategy.wrap(model)
        self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return ``optimizer`` so that it steps with the accumulation windows; see `AcceleratedOptimizer`."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            place = self.device_placement if device_placement is None else device_placement
            optimizer = AcceleratedOptimizer(optimizer, place, self.precision)
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None
    ) -> DataLoader[Any]:
        """Return ``data_loader`` so that it gives this process's share; see `accel.data.prepare_data_loader`."""
        config = self.dataloader_config
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            self.num_processes,
            self.process_index,
            split_batches=config.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=self.rng_types,
            even_batches=config.even_batches,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        if all(known is not prepared for known in self._dataloaders):
            self._dataloaders.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return ``scheduler`` so that it steps when its optimizer did; see `AcceleratedScheduler`."""
        if not isinstance(scheduler, AcceleratedScheduler):
            inner = getattr(scheduler, "optimizer", None)
            mine = [known for known in self._optimizers if inner is known or inner is known.optimizer]
            found = mine or self._optimizers
            prepared = AcceleratedScheduler(scheduler, found, self.step_scheduler_with_optimizer, self.split_batches)
        else:
            prepared = scheduler
        if all(known is not prepared for known in self._schedulers):
            self._schedulers.append(prepared)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of ``loss``, divided by the number of batches in this accumulation window.

        ``kwargs`` are those of `torch.Tensor.backward`.
        """
        length = self._window.length
        self.precision.backward(loss if length == 1 else loss / length, **kwargs)

    def accumulate(self, *models: torch.nn.Module) -> AbstractContextManager[None]:
        """A region for one batch: until it ends a window, optimizers rest and gradients of ``models`` do not travel."""
        return Accumulation(self._window, self.strategy, models)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A region whose backward passes leave the gradients of ``model`` on their process."""
        return self.strategy.no_sync(model)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A region in which processes may run out of batches at different times, on every kind of device.

        ``even_batches`` stands for that setting of every prepared loader inside the region.
        """
        samplers = [getattr(loader, "batches", None) for loader in self._dataloaders]
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
        """A region in which operations run in the mixed precision of this run; prepared models need none."""
        return self.precision.autocast(autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make gradients those of the loss itself (fp16), for one optimizer, several, or all prepared ones."""
        if optimizer is None:
            optimizer = self._optimizers
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
        if self.scaler is None:
            return
        if not self.sync_gradients:
            raise StateError(
                f"{name} in the middle of an accumulation window: put it under `if accelerator.sync_gradients:`"
            )
        self.unscale_gradients()

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the model inside what `prepare` returned.

        Without ``keep_fp32_wrapper`` its forward no longer runs in mixed precision, and without ``keep_torch_compile``
        it is the one that was compiled.
        """
        return unwrap(self.strategy, model, keep_fp32_wrapper, keep_torch_compile)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """See `accel.skip_first_batches`."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[Any]:
        """Let go of everything prepared and of ``objects``; returns as many ``None``."""
        released: list[Any] = [None] * len(objects)
        del objects
        self._forget()
        self.step = 0
        gc.collect()
        if self.device.type in ("cuda", "xpu"):
            getattr(torch, self.device.type).empty_cache()
        return released

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def end_training(self) -> None:
        """End the world of processes. To be called by all, last of all."""
        self.state.destroy_process_group()


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, torch.optim.lr_scheduler.LRScheduler)
