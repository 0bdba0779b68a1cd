"""`Accelerator`, the object that a training script holds: its methods, by subject; not the work behind them, which
is in the other rooms.

A façade: which process this is lies in `accel.state`, how the model is spread in `accel.parallel`, in which precision
it computes in `accel.precision`, which data it sees in `accel.data`, what processes say to each other in
`accel.collectives`, and what is kept on disk in `accel.checkpoint`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from accel.accelerator.arguments import (
    accumulation,
    by_type,
    loading,
    project,
    refuse_environment,
    refuse_unbuilt,
    refuse_unknown,
)
from accel.accelerator.checkpoints import CheckpointControl
from accel.accelerator.communication import ProcessControl
from accel.accelerator.loaders import LoadingControl
from accel.accelerator.preemption import PreemptionControl
from accel.accelerator.trackers import TrackingControl
from accel.accelerator.training import TrainingControl
from accel.accelerator.unsupported import Dimensions
from accel.errors import ArgumentError
from accel.parallel import choose_strategy
from accel.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.precision import choose_precision
from accel.state import AcceleratorState, GradientState
from accel.training.accumulation import Window
from accel.training.compile import compile_regions, compiles, dynamo
from accel.training.optimizer import AcceleratedOptimizer
from accel.training.profiling import ProfileControl, ProfileKwargs
from accel.training.scheduler import AcceleratedScheduler
from accel.world.available import is_bitsandbytes_multi_backend_available, is_xpu_available

Handler = TypeVar("Handler", bound=KwargsHandler)


class Accelerator(
    TrainingControl,
    LoadingControl,
    ProcessControl,
    ProfileControl,
    PreemptionControl,
    CheckpointControl,
    TrackingControl,
    Dimensions,
):
    """Trains the same script on one process or many.

    ``mixed_precision``: ``"no"``, ``"bf16"`` or ``"fp16"``; without it ``ACCELERATE_MIXED_PRECISION``.
    ``gradient_accumulation_steps``: batches to one optimizer step; at 1, ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``
    counts, and a ``gradient_accumulation_plugin`` stands for both. ``device_placement``: models and batches are put
    on `device`. ``rng_types``: which generators are made equal on all processes when an epoch begins.
    ``log_with``: the trackers that `log` writes to, by name, instance or class; see `init_trackers`.
    ``kwargs_handlers``: at most one each of `AutocastKwargs`, `DistributedDataParallelKwargs`, `GradScalerKwargs`,
    `InitProcessGroupKwargs` and `ProfileKwargs`.

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
        dynamo_plugin: TorchDynamoPlugin | None = None,
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
        self.profile_handler = handlers.get(ProfileKwargs)
        self.dataloader_config = loading(dataloader_config, split_batches)
        self.project_configuration = project(project_config, project_dir)
        self._init_tracking(log_with)
        self.dynamo_plugin = dynamo(dynamo_backend, dynamo_plugin)
        options = self.init_handler.to_kwargs() if self.init_handler else {}
        self.state = AcceleratorState(mixed_precision, cpu, self.dynamo_plugin, **options)
        self.gradient_state = GradientState(accumulation(gradient_accumulation_plugin, gradient_accumulation_steps))
        self.strategy = choose_strategy(self.state, self.ddp_handler)
        self.precision = choose_precision(self.mixed_precision, self.device, self.autocast_handler, self.scaler_handler)
        self._window = Window(self.gradient_state)
        self._forget()
        self._init_checkpoints()
        self._init_preemption()

    def _forget(self) -> None:
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[DataLoader[Any]] = []
        self._custom_objects: list[Any] = []

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
        spread = self.verify_device_map(model)
        if spread and self.use_distributed and not evaluation_mode:
            raise ArgumentError(
                "prepare: a model that is dispatched over several devices cannot be trained by several processes: "
                "load it without device_map, or start one process"
            )
        placed = _is_quantised_in_place(model, self.device) or spread
        if not placed and (self.device_placement if device_placement is None else device_placement):
            model = self.strategy.place(model)
            for optimizer in self._optimizers:
                self.strategy.adopt(optimizer.optimizer)
        self.precision.wrap_forward(model)
        if compiles(self.dynamo_plugin, model, regions=True):
            model = compile_regions(model, **self.dynamo_plugin.to_kwargs())
        if not evaluation_mode:
            model = self.strategy.wrap(model)
        if compiles(self.dynamo_plugin, model, regions=False):
            model = cast(torch.nn.Module, torch.compile(model, **self.dynamo_plugin.to_kwargs()))
        self._models.append(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return ``optimizer`` so that it steps with the accumulation windows; see `AcceleratedOptimizer`."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            place = self.device_placement if device_placement is None else device_placement
            self.strategy.adopt(optimizer)
            optimizer = AcceleratedOptimizer(optimizer, place, precision=self.precision)
        if all(known is not optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer

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


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, torch.optim.lr_scheduler.LRScheduler)


def _is_quantised_in_place(model: torch.nn.Module, device: torch.device) -> bool:
    """Return True for an 8-bit or 4-bit model with a device map. Raises `ArgumentError` where it cannot be trained."""
    quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()} if quantised else set()
    if "disk" in places or ("cpu" in places and (is_xpu_available() or not is_bitsandbytes_multi_backend_available())):
        raise ArgumentError("prepare: a model in 8 or 4 bits cannot be trained with parts on the CPU or the disk")
    if len(places) == 1:
        (place,) = places
        loaded = torch.device(device.type, int(place)) if place.isdigit() else torch.device(place)
        if (loaded.type, loaded.index or 0) != (device.type, device.index or 0):
            raise ArgumentError(
                f"prepare: a model in 8 or 4 bits is on {loaded} and this process trains on {device}: "
                'load it with device_map={"": PartialState().device}'
            )
    return bool(places)
