"""`Accelerator`, the object that a training script holds: its methods, one module a subject.

A façade over `accel.state` (this process), `accel.parallel` (distribution of models), `accel.precision`,
`accel.data` (loaders), `accel.collectives` and `accel.checkpoint`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch.utils.data import DataLoader

from accel.accelerator.arguments import (
    handlers_by_class,
    recipe_of,
    refuse_unknown,
    resolve_accumulation,
    resolve_deepspeed,
    resolve_fsdp,
    resolve_loading,
    resolve_megatron,
    resolve_parallelism,
    resolve_project,
)
from accel.accelerator.checkpoints import CheckpointControl
from accel.accelerator.communication import Dimensions, ProcessControl
from accel.accelerator.preemption import PreemptionControl
from accel.accelerator.run import Run
from accel.accelerator.trackers import ProfileControl, TrackingControl
from accel.accelerator.training import LoadingControl, TrainingControl
from accel.data.loader import PreparedLoader
from accel.enums import DynamoBackend
from accel.errors import ArgumentError
from accel.exit_codes import REQUEUE
from accel.logging import get_logger
from accel.parallel import choose_strategy
from accel.parallel.base import Loading
from accel.parallel.shares import is_split
from accel.parallel.unwrap import is_compiled_module
from accel.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accel.plugins.deepspeed import DummyOptim, DummyScheduler
from accel.precision import choose_precision
from accel.state import AcceleratorState, GradientState
from accel.training.accumulation import Window
from accel.training.compile import compile_regions, compile_regions_in_place, compiles, dynamo
from accel.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler, DeepSpeedSchedulerWrapper
from accel.world.available import is_bitsandbytes_multi_backend_available, is_xpu_available

# An object and whether to move it to the device; None: the default of the `Accelerator`.
_WithPlacement: TypeAlias = "tuple[Any, bool | None]"

logger = get_logger(__name__)


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
    """The object that runs one training script on one process or many.

    ``device_placement``: move models and batches to `device`.
    ``mixed_precision``: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; default: ``ACCELERATE_MIXED_PRECISION``.
    ``gradient_accumulation_steps``: batches per optimizer step; at 1, those of an earlier `Accelerator` in this
        process apply, else ``ACCELERATE_GRADIENT_ACCUMULATION_STEPS``.
    ``gradient_accumulation_plugin``: replaces them.
    ``deepspeed_plugin``: train by DeepSpeed (`DeepSpeedPlugin`, or a dict of them); default: that of an earlier
        `Accelerator`, else from the environment if ``ACCELERATE_USE_DEEPSPEED`` is set. ``deepspeed_plugins`` is an
        alias.
    ``fsdp_plugin``: shard models over the processes (`FullyShardedDataParallelPlugin`); default: that of an earlier
        `Accelerator`, else from the environment if ``ACCELERATE_USE_FSDP`` is set.
    ``megatron_lm_plugin``: replaces ``fsdp_plugin`` and ``parallelism_config`` (`MegatronLMPlugin`); default: that of
        an earlier `Accelerator`, else from the environment if ``ACCELERATE_USE_MEGATRON_LM`` is set.
    ``parallelism_config``: the processes to shard over (`ParallelismConfig`); or ``torch_tp_plugin``: its
        ``tp_size`` alone.
    ``rng_types``: the generators to synchronize over all processes when an epoch begins.
    ``log_with``: the trackers that `log` writes to, by name, instance or class; see `init_trackers`.
    ``kwargs_handlers``: at most one each of `AutocastKwargs`, `DistributedDataParallelKwargs`,
        `GradScalerKwargs`, `InitProcessGroupKwargs`, `ProfileKwargs`, and one recipe of fp8 (`AORecipeKwargs`,
        `TERecipeKwargs`).

    Raises `WorldError` if the environment describes several processes that cannot form one world,
    `PrecisionError` if the device lacks the precision, and `ArgumentError` for any other invalid argument.
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
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, Accelerator.__init__.__annotations__)
        handlers = handlers_by_class(kwargs_handlers or ())
        self.device_placement = device_placement
        self.rng_types = rng_types
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.autocast_handler = handlers.get(AutocastKwargs)
        self.ddp_handler = handlers.get(DistributedDataParallelKwargs)
        self.scaler_handler = handlers.get(GradScalerKwargs)
        self.init_handler = handlers.get(InitProcessGroupKwargs)
        self.profile_handler = handlers.get(ProfileKwargs)
        self.dataloader_config = resolve_loading(dataloader_config, split_batches)
        files = resolve_project(project_config, project_dir)
        self._init_tracking(log_with, files.logging_dir)
        self.dynamo_plugin = dynamo(dynamo_backend, dynamo_plugin)
        options = self.init_handler.to_kwargs() if self.init_handler else {}
        megatron_lm_plugin = resolve_megatron(
            megatron_lm_plugin,
            fsdp_plugin=fsdp_plugin,
            parallelism_config=parallelism_config,
            torch_tp_plugin=torch_tp_plugin,
            deepspeed_plugin=deepspeed_plugin or deepspeed_plugins,
        )
        engine_plugins = resolve_deepspeed(deepspeed_plugin, deepspeed_plugins)
        accumulation = resolve_accumulation(gradient_accumulation_plugin, gradient_accumulation_steps, engine_plugins)
        if megatron_lm_plugin is None:
            fsdp_plugin = resolve_fsdp(fsdp_plugin)
            parallelism_config = resolve_parallelism(parallelism_config, torch_tp_plugin)
        else:
            fsdp_plugin = megatron_lm_plugin.fsdp_plugin
            parallelism_config = megatron_lm_plugin.parallelism_config
        if fsdp_plugin is not None:
            options = {**fsdp_plugin.world_options(), **options}
        state = AcceleratorState(
            mixed_precision,
            cpu,
            self.dynamo_plugin,
            engine_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            **options,
        )
        gradient_state = GradientState(accumulation)
        strategy = choose_strategy(state, {**handlers, **_by_class(state.fsdp_plugin, state.parallelism_config)})
        if state.megatron_lm_plugin is not None:
            strategy.max_norm = state.megatron_lm_plugin.gradient_clipping
        self._run = Run(
            state=state,
            gradient_state=gradient_state,
            strategy=strategy,
            precision=choose_precision(
                strategy.model_precision(state.mixed_precision),
                state.device,
                self.autocast_handler,
                self.scaler_handler,
                recipe_of(handlers),
            ),
            window=Window(gradient_state),
            project=files,
        )
        if torch_tp_plugin is not None and state.device_mesh is not None:
            torch_tp_plugin.torch_device_mesh = state.device_mesh["tp"]
        self._init_checkpoints()
        self._init_preemption()

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Return models, optimizers, data loaders and schedulers, in the order given, ready for this world.

        Other objects (``None`` too) and objects that are already prepared are returned unchanged.
        ``device_placement`` has a flag for each object: move it to `device`, or ``None`` for the default.
        """
        placements = list(device_placement) if device_placement is not None else [None] * len(args)
        if len(placements) != len(args):
            raise ArgumentError(f"prepare(device_placement=…) has {len(placements)} values for {len(args)} objects")
        pairs = list(zip(args, placements, strict=True))
        ready: dict[int, Any] = {}
        for item, placement in pairs:
            if isinstance(item, DataLoader):
                ready[id(item)] = self.prepare_data_loader(item, device_placement=placement)
        ready |= self._prepare_training(
            [(item, placement) for item, placement in pairs if isinstance(item, torch.nn.Module)],
            [(item, placement) for item, placement in pairs if isinstance(item, (torch.optim.Optimizer, DummyOptim))],
            [item for item in args if _is_scheduler(item)],
        )
        if any(isinstance(item, torch.nn.Module) for item in args):
            ready |= {
                id(item): self.strategy.split_loader(ready[id(item)]) for item in args if isinstance(item, DataLoader)
            }
        prepared = [ready.get(id(item), item) for item in args]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Return ``model`` on its device, in its precision and, except for ``evaluation_mode``, distributed.

        A model prepared by an earlier call is returned as that call returned it; for ``evaluation_mode``, as it is.
        """
        prepared = self._prepare_training([(model, device_placement)], [], evaluation=evaluation_mode)
        return cast(torch.nn.Module, prepared[id(model)])

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap ``optimizer`` so that it steps at the end of each accumulation window; see `AcceleratedOptimizer`."""
        prepared = self._prepare_training([], [(optimizer, device_placement)])
        return cast(AcceleratedOptimizer, prepared[id(optimizer)])

    def _prepare_training(
        self,
        models: Sequence[_WithPlacement],
        optimizers: Sequence[_WithPlacement],
        schedulers: Sequence[Any] = (),
        *,
        evaluation: bool = False,
    ) -> dict[int, Any]:
        """Return prepared objects by the `id` of the original.

        A model and its optimizer may come in different calls, in either order.
        """
        prepared: dict[int, Any] = {id(model): self._known_model(model, evaluation) for model, _ in models}
        prepared |= {id(optimizer): self._known_optimizer(optimizer) for optimizer, _ in optimizers}
        new_models = {id(model): (model, placement) for model, placement in models if prepared[id(model)] is None}
        new_optimizers = {
            id(optimizer): (optimizer, placement)
            for optimizer, placement in optimizers
            if prepared[id(optimizer)] is None
        }
        for optimizer, _ in new_optimizers.values():
            if not self.strategy.shards_models:
                _refuse_offloaded(optimizer)
        placed = [self._begin_model(model, placement, evaluation) for model, placement in new_models.values()]
        # Models that their loading has spread stay as they are, and Trainer prepares them for evaluation only.
        results = self.strategy.prepare(
            [model for model in placed if is_split(model)] if evaluation else placed,
            [optimizer for optimizer, _ in new_optimizers.values()],
            schedulers,
            Loading(batch_sizes=self._batch_sizes, split_batches=self.split_batches),
        )
        for key, model in zip(new_models, placed if evaluation else results.models, strict=True):
            prepared[key] = self._end_model(model)
            if not self.strategy.leaves_out(prepared[key]):
                self._run.models.append(prepared[key])
            if evaluation:
                self._run.evaluated.add(prepared[key])
        for (key, (_, placement)), optimizer in zip(new_optimizers.items(), results.optimizers, strict=True):
            placement = self.device_placement if placement is None else placement
            prepared[key] = AcceleratedOptimizer(optimizer, placement, precision=self.precision, strategy=self.strategy)
            self._run.optimizers.append(prepared[key])
        # Schedulers come last: each is joined to the prepared optimizer that holds its own.
        for scheduler, result in zip(schedulers, results.schedulers, strict=True):
            prepared[id(scheduler)] = self._wrap_scheduler(result)
        return prepared

    @property
    def _batch_sizes(self) -> list[int]:
        return [loader.nominal_rows for loader in self._run.loaders if isinstance(loader, PreparedLoader)]

    def _known_model(self, model: torch.nn.Module, evaluation: bool) -> torch.nn.Module | None:
        """Return ``model`` as an earlier call prepared it, or None.

        A model that was prepared for evaluation only is prepared again for training.
        """
        run = self._run
        for prepared in run.models:
            if prepared is model or self.strategy.unwrap(prepared) is model:
                if evaluation:
                    return model
                if prepared not in run.evaluated:
                    return prepared
                run.models = [other for other in run.models if other is not prepared]
        return None

    def _known_optimizer(self, optimizer: torch.optim.Optimizer) -> AcceleratedOptimizer | None:
        """Return ``optimizer`` as an earlier call prepared it; register one that another `Accelerator` prepared."""
        for prepared in self._run.optimizers:
            if optimizer is prepared or _steps(prepared, optimizer):
                return prepared
        if isinstance(optimizer, AcceleratedOptimizer):
            self._run.optimizers.append(optimizer)
            return optimizer
        return None

    def _begin_model(self, model: torch.nn.Module, placement: bool | None, evaluation: bool) -> torch.nn.Module:
        dispatched = self.verify_device_map(model) or _is_offloaded(model)
        if dispatched and self.use_distributed and not evaluation:
            raise ArgumentError(
                "prepare: a model that is offloaded, or dispatched over several devices, cannot be trained by several "
                "processes: load it without device_map, or start one process"
            )
        if not evaluation:
            self.precision.convert(model, self.dynamo_plugin.backend != DynamoBackend.NO or is_compiled_module(model))
        is_placed = _is_quantised_in_place(model, self.device) or dispatched
        if not is_placed and (self.device_placement if placement is None else placement):
            model = self.strategy.place(model, evaluation)
        self.precision.wrap_forward(model, autocast=evaluation or self.strategy.needs_autocast(model))
        if compiles(self.dynamo_plugin, model, regions=True):
            by_regions = compile_regions_in_place if self.strategy.compiles_in_place else compile_regions
            model = by_regions(model, **self.dynamo_plugin.to_kwargs())
        return model

    def _end_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if compiles(self.dynamo_plugin, model, regions=False):
            return self.strategy.compile(model, **self.dynamo_plugin.to_kwargs())
        return model

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap ``scheduler`` so that it steps when its optimizer did; see `AcceleratedScheduler`."""
        return cast(AcceleratedScheduler, self._prepare_training([], [], [scheduler])[id(scheduler)])

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        if self.strategy.steps_scheduler(scheduler):
            prepared: AcceleratedScheduler = DeepSpeedSchedulerWrapper(scheduler, self._run.optimizers)
        elif not isinstance(scheduler, AcceleratedScheduler):
            inner = getattr(scheduler, "optimizer", None)
            matching = [
                candidate for candidate in self._run.optimizers if inner is candidate or _steps(candidate, inner)
            ]
            optimizers = matching or self._run.optimizers
            prepared = AcceleratedScheduler(
                scheduler,
                optimizers,
                self.step_scheduler_with_optimizer,
                self.split_batches,
                shares=self.strategy.batches_at_once,
            )
        else:
            prepared = scheduler
        if all(candidate is not prepared for candidate in self._run.schedulers):
            self._run.schedulers.append(prepared)
        return prepared

    def checkpoint_on_preemption(self, dir: str | os.PathLike[str] | None = None) -> None:
        """Save the run's state and end the process if the run is `preempted`; otherwise return at once.

        Call it on all processes after each batch; like `preempted`, equally often on each. ``dir`` is as for
        `save_state`; without it, checkpoints must be named automatically. In an accumulation window whose gradients
        cannot be saved, the save waits for the window's end.

        The state is on disk before trackers are finished; a tracker that fails is named in a warning and loses only
        its records. Raises `SystemExit` with `accel.exit_codes.REQUEUE` (85) on every process, which ``accel launch``
        reports as preempted.
        """
        if dir is None and not self.project_configuration.automatic_checkpoint_naming:
            raise ArgumentError(
                "checkpoint_on_preemption() needs a directory, or Accelerator(project_config="
                "ProjectConfiguration(automatic_checkpoint_naming=True), project_dir=…)"
            )
        if not self.preempted or not self._can_be_saved:
            return
        path = self.save_state(dir)
        try:
            self._finish_trackers()
        except Exception as error:
            from accel.tracking.isolation import first_line

            # The state is saved: a tracker's error must not replace the exit code that requests a restart.
            logger.warning(f"a tracker could not be finished: {first_line(error)}", main_process_only=False)
        logger.warning(f"preempted: saved {path}, ending with code {REQUEUE} to be started again")
        raise SystemExit(REQUEUE)

    def end_training(self) -> None:
        """End the run: restore signal handlers, wait for the checkpoint, finish trackers, leave the world.

        Call it last, on all processes. Each step runs even if an earlier one failed; the last error is raised, such
        as `CheckpointError` if the last checkpoint could not be written.
        """
        _call_all(
            [self._end_preemption, self._checkpoints.release, self._finish_trackers, self.state.destroy_process_group]
        )

    def free_memory(self, *objects: Any) -> list[Any]:
        """Drop all prepared objects and ``objects``; return a list with ``None`` for each of ``objects``."""
        released: list[Any] = [None] * len(objects)
        del objects
        self._run.forget()
        self.strategy.release()
        self.step = 0
        self.sync_gradients = True
        gc.collect()
        if self.device.type in ("cuda", "xpu"):
            getattr(torch, self.device.type).empty_cache()
        return released

    def clear(self, *objects: Any) -> list[Any]:
        """Alias of `free_memory`."""
        return self.free_memory(*objects)


def _call_all(steps: Sequence[Callable[[], None]]) -> None:
    """Call every step even if earlier ones raise. Raises the last error, with the earlier ones as its context."""
    if steps:
        try:
            steps[0]()
        finally:
            _call_all(steps[1:])


def _by_class(*plugins: Any) -> dict[type, Any]:
    return {type(plugin): plugin for plugin in plugins if plugin is not None}


def _steps(prepared: AcceleratedOptimizer, optimizer: Any) -> bool:
    """Return True if ``prepared`` steps ``optimizer``, which an engine's own optimizer may hold."""
    return optimizer is prepared.optimizer or optimizer is vars(prepared.optimizer).get("optimizer", prepared.optimizer)


def _is_scheduler(item: Any) -> bool:
    is_torchs = isinstance(item, (torch.optim.lr_scheduler.LRScheduler, DummyScheduler))
    return is_torchs or type(item).__module__ == "deepspeed.runtime.lr_schedules"


def _is_offloaded(model: torch.nn.Module) -> bool:
    """Return True if weights of ``model`` are on the host or the disk between forwards."""
    hooked = [part for part in model.modules() if hasattr(part, "_hf_hook")]
    if hooked:
        from accel.big_models.align import has_offloaded_params

        return any(map(has_offloaded_params, hooked))
    return False


def _refuse_offloaded(optimizer: Any) -> None:
    groups = getattr(optimizer, "param_groups", ())  # a placeholder has none
    if any(parameter.is_meta for group in groups for parameter in group["params"]):
        raise ArgumentError(
            f"prepare: {type(optimizer).__name__} has parameters on the meta device, such as those of an offloaded "
            "model, which cannot be trained: load the model without offloading it"
        )


def _is_quantised_in_place(model: torch.nn.Module, device: torch.device) -> bool:
    """Return True for an 8-bit or 4-bit model with a device map. Raises `ArgumentError` where it cannot be trained."""
    quantised = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
    targets = {str(target) for target in getattr(model, "hf_device_map", {}).values()} if quantised else set()
    if "disk" in targets or (
        "cpu" in targets and (is_xpu_available() or not is_bitsandbytes_multi_backend_available())
    ):
        raise ArgumentError("prepare: a model in 8 or 4 bits cannot be trained with parts on the CPU or the disk")
    if len(targets) == 1:
        (target,) = targets
        loaded = torch.device(device.type, int(target)) if target.isdigit() else torch.device(target)
        if (loaded.type, loaded.index or 0) != (device.type, device.index or 0):
            raise ArgumentError(
                f"prepare: a model in 8 or 4 bits is on {loaded} and this process trains on {device}: "
                'load it with device_map={"": PartialState().device}'
            )
    return bool(targets)
