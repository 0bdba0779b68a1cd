"""Training by DeepSpeed: its engine steps, clips, scales and shards; accumulation windows are accel's.

Imports DeepSpeed only when a run uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from accel.errors import ArgumentError, CheckpointError, PrecisionError, StateError
from accel.logging import get_logger
from accel.parallel.base import Loading, Prepared, Strategy
from accel.parallel.deepspeed_engine import DeepSpeedEngineWrapper, load_deepspeed, universal_format
from accel.parallel.deepspeed_layers import gathered_state, release_groups, saved_size, splitting
from accel.parallel.deepspeed_sequences import Sequences, SplitLoader
from accel.parallel.deepspeed_settings import (
    check_placeholders,
    fill,
    for_engine,
    load_extensions,
    own_scheduler,
    refuse_alone,
    resolve_sizes,
    share_groups,
)
from accel.plugins.deepspeed import DeepSpeedPlugin, DummyOptim, DummyScheduler
from accel.precision.base import Precision
from accel.state import AcceleratorState, GradientState
from accel.world.process_group import form_alone

logger = get_logger(__name__)

_CLIPPING = "DeepSpeedPlugin(gradient_clipping=…), --gradient_clipping, or gradient_clipping in its configuration"


class DeepSpeed(Strategy):
    """One engine, which trains one model by one optimizer, with the plug-in that was selected at its `prepare`."""

    joins = True
    lockstep = "under DeepSpeed"
    compiles_in_place = True
    is_engine = True
    state: AcceleratorState

    def __init__(self, state: AcceleratorState) -> None:
        super().__init__(state)
        plugins = state.deepspeed_plugins
        every_plugin = list(plugins.values()) if isinstance(plugins, dict) else [self._plugin]
        self._sp_size, self._tp_size = resolve_sizes(state.parallelism_config, every_plugin, state.num_processes)
        if self._plugin.mixed_precision == "fp16" and state.device.type == "cpu":
            raise PrecisionError("DeepSpeed: fp16 needs a GPU, but this process uses the CPU: use bf16 or no")
        os.environ.setdefault("LOCAL_RANK", str(max(state.local_process_index, 0)))  # the engine reads it
        self._deepspeed = load_deepspeed(state.device)
        form_alone(state.device)
        self._deepspeed.init_distributed(verbose=False)
        self.engine: DeepSpeedEngineWrapper | None = None
        self._sequences: Sequences | None = None
        self._inference: WeakSet[nn.Module] = WeakSet()  # engines of models that are not trained
        self._plugin_by_model: WeakKeyDictionary[nn.Module, DeepSpeedPlugin] = WeakKeyDictionary()
        self._deferred = 0  # blocks of `no_sync` that have begun

    @property
    def _plugin(self) -> DeepSpeedPlugin:
        plugin = self.state.deepspeed_plugin
        if plugin is None:
            raise StateError("DeepSpeed: the state was reset: make a new Accelerator")
        return plugin

    @property
    def shards_models(self) -> bool:  # type: ignore[override]
        """True at stage 3."""
        return _is_zero3(self._plugin) if self.engine is None else self.shards(self.engine.engine)

    def shards(self, model: nn.Module) -> bool:
        """See `Strategy.shards`; a model is at the stage of the plug-in that was selected at its `prepare`."""
        return _is_zero3(self._plugin_of(model))

    def _plugin_of(self, model: nn.Module) -> DeepSpeedPlugin:
        return self._plugin_by_model.get(self.unwrap(model)) or self._plugin

    @property
    def data_place(self) -> tuple[int, int]:
        """See `Strategy.data_place`: the processes that split sequences read different batches all the same."""
        return self.state.num_processes // self._tp_size, self.state.process_index // self._tp_size

    @property
    def batches_at_once(self) -> int:
        """See `Strategy.batches_at_once`: the processes that split sequences share each batch."""
        return self.data_place[0] // self._sp_size

    def split_loader(self, loader: Any) -> Any:
        """See `Strategy.split_loader`."""
        if self._sp_size == 1 or isinstance(loader, SplitLoader):
            return loader
        if self._sequences is None:
            raise ArgumentError("deepspeed_ulysses_dl_adapter: prepare the model and its optimizer first")
        return SplitLoader(loader, self._sequences, self.state.device)

    def place(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        """Leave ``model`` where it is: the engine moves it. A model for evaluation is moved, unless it is sharded."""
        return super().place(model) if evaluation and not _is_partitioned(model) else model

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        schedulers: Sequence[Any] = (),
        loading: Loading | None = None,
    ) -> Prepared:
        """Return the engine for the model that is trained, and DeepSpeed's own optimizer and scheduler.

        Models without trained parameters stay as they are, on the device; at stage 3, one that comes without an
        optimizer is sharded for inference, by an engine of its own. Raises `ArgumentError` for a second trained model,
        and for a model, an optimizer or a placeholder without its counterpart.
        """
        trained = [model for model in models if self._is_for_engine(model, optimizers)]
        if not trained:
            refuse_alone(optimizers, schedulers)
            return Prepared([super(DeepSpeed, self).place(model) for model in models], [], list(schedulers))
        plugin = self._plugin
        trains = bool(optimizers) or "optimizer" in plugin.deepspeed_config
        if len(trained) > 1 or len(optimizers) > 1 or (self.engine and (trains or self._sp_size > 1)):
            raise ArgumentError(
                "prepare: under DeepSpeed an Accelerator trains one model by one optimizer: make another Accelerator "
                "for the other model, and select its plug-in first (AcceleratorState().select_deepspeed_plugin)"
            )
        (model,), optimizer = trained, optimizers[0] if optimizers else None
        scheduler = own_scheduler(schedulers)
        check_placeholders(plugin, optimizer, schedulers)
        plugin.set_moe_leaf_modules(model)
        world, copies = self.batches_at_once, self._sp_size * self._tp_size
        fill(plugin, model, optimizer, scheduler, loading or Loading(), world=world, copies=copies)
        engine, engine_optimizer, engine_scheduler = self._initialize(plugin, model, optimizer, scheduler)
        self._plugin_by_model[self.unwrap(engine)] = plugin
        if trains:
            self.engine = DeepSpeedEngineWrapper(engine)
            self.engine.config = plugin.deepspeed_config
        else:
            self._inference.add(engine)
        return Prepared(
            [engine if item is model else super(DeepSpeed, self).place(item) for item in models],
            [engine_optimizer] * len(optimizers),
            [engine_scheduler if item is scheduler else item for item in schedulers],
        )

    def _is_for_engine(self, model: nn.Module, optimizers: Sequence[Any]) -> bool:
        if model in self._inference:
            return False
        if any(parameter.requires_grad for parameter in model.parameters()):
            return True
        return _is_zero3(self._plugin) and not optimizers and any(True for _ in model.parameters())

    def _initialize(self, plugin: DeepSpeedPlugin, model: nn.Module, optimizer: Any, scheduler: Any) -> Any:
        config = deepcopy(plugin.deepspeed_config)
        # The engine never counts: each backward pass says whether it completes a window, which divides its own loss.
        micro = config.get("train_micro_batch_size_per_gpu")
        total = config.pop("train_batch_size", None)
        steps = config.pop("gradient_accumulation_steps", None) or 1
        config["train_micro_batch_size_per_gpu"] = micro or (total or 1) // (steps * self.batches_at_once) or 1
        arguments: dict[str, Any] = {"model": model, "config": config}
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = optimizer.params
        elif optimizer is not None:
            config["zero_allow_untested_optimizer"] = True
            arguments["optimizer"] = for_engine(optimizer, config)
        elif "optimizer" in config:
            arguments["model_parameters"] = [parameter for parameter in model.parameters() if parameter.requires_grad]
        elif config["zero_optimization"]["stage"] != 3:
            raise ArgumentError("prepare: under DeepSpeed a model and its optimizer must come in one call")
        factory = scheduler.lr_scheduler_callable if isinstance(scheduler, DummyScheduler) else scheduler
        if factory is not None:
            arguments["lr_scheduler"] = factory
        if self._sp_size > 1:
            parallelism: Any = self.state.parallelism_config
            attention = parallelism.sp_handler.sp_attn_implementation
            self._sequences = Sequences(model, self._sp_size, attention, config["zero_optimization"])
            arguments["mpu"] = self._sequences.groups
        load_extensions(config)
        with splitting(model, self._tp_size):
            engine, engine_optimizer, _, engine_scheduler = self._deepspeed.initialize(**arguments)
        share_groups(engine)
        return engine, engine_optimizer, engine_scheduler

    def model_precision(self, name: str) -> str:
        """See `Strategy.model_precision`; layers are converted to 8 bits before the engine gets them."""
        return name if name == "fp8" else "no"

    def needs_autocast(self, model: nn.Module) -> bool:
        """See `Strategy.needs_autocast`: the engine casts models."""
        return False

    def compile(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Compile the model inside the engine ``model``."""
        if self.engine is None or not self.saves(model):
            return super().compile(model, **kwargs)
        self.engine.engine.compile(backend=kwargs.pop("backend"), compile_kwargs=kwargs)
        return model

    def backward(self, loss: torch.Tensor, length: int, last: bool, precision: Precision, **kwargs: Any) -> None:
        """Compute gradients; with ``last``, outside `no_sync`, step too.

        ``scale_wrt_gas=False``, as Trainer passes it: the loss is divided already.
        """
        if self.engine is None:
            raise StateError("backward: under DeepSpeed, prepare the model and its optimizer in one call first")
        parts = length if kwargs.pop("scale_wrt_gas", True) else 1
        if not self.shards_models:  # the engine adds the gradients of a sequence's parts; at stage 3 it averages them
            parts *= self._sp_size
        self.engine.backward(loss if parts == 1 else loss / parts, last and not self._deferred, **kwargs)

    def step(self, optimizer: Any, precision: Precision, closure: Callable[[], Any] | None = None) -> bool:
        """Do nothing, as the last `backward` has stepped; return True if it skipped the step."""
        if closure is not None:
            raise ArgumentError("step(closure): under DeepSpeed the backward pass steps: call step() without a closure")
        return self.engine is not None and self.engine.skipped

    def zero_grad(self, optimizer: Any, **kwargs: Any) -> None:
        """Do nothing: the engine clears gradients when it steps."""

    def steps_scheduler(self, scheduler: Any) -> bool:
        """See `Strategy.steps_scheduler`."""
        return self.engine is not None and scheduler is self.engine.engine.lr_scheduler

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Make no backward pass of the block step; the engine reduces gradients when its stage needs it."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Return the norm of the step that the last `backward` has taken. The engine has clipped already.

        Raises `ArgumentError` for another norm than the engine's, and `StateError` in the middle of a window.
        """
        if self.engine is None or not GradientState().sync_gradients or self._deferred:
            raise StateError(
                "clip_grad_norm_ in the middle of an accumulation window: put it under `if accelerator.sync_gradients:`"
            )
        clipping = self.engine.engine.gradient_clipping()
        if float(max_norm) != float(clipping) or norm_type != 2:
            requested = f"{max_norm}" if norm_type == 2 else f"{max_norm}, norm_type={norm_type}"
            own = f"to a 2-norm of {clipping}" if clipping else "nothing"
            raise ArgumentError(
                f"clip_grad_norm_({requested}): DeepSpeed clips in its own step, in this run {own}: set {_CLIPPING}"
            )
        norm = self.engine.get_global_grad_norm()
        return torch.tensor(0.0 if norm is None else norm, device=self.state.device)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Raise `ArgumentError`: the engine has stepped already, and clips norms only."""
        raise ArgumentError(f"clip_grad_value_: DeepSpeed clips norms only: set {_CLIPPING}")

    def leaves_out(self, model: nn.Module) -> bool:
        """See `Strategy.leaves_out`: a model that is sharded for inference, which is not gathered to be saved."""
        return model in self._inference

    def saves(self, item: Any) -> bool:
        """See `Strategy.saves`."""
        if self.engine is None:
            return False
        engine = self.engine.engine
        return item is engine or getattr(item, "optimizer", None) is engine.optimizer

    def save_engine(self, folder: Path, name: str) -> None:
        """See `Strategy.save_engine`; the files are DeepSpeed's."""
        assert self.engine is not None
        with self._whole_layers():
            self.engine.engine.save_checkpoint(str(folder), name)

    def load_engine(self, folder: Path, name: str, processes: int) -> None:
        """See `Strategy.load_engine`; files of another number of processes are converted first, by one process."""
        assert self.engine is not None
        engine, path = self.engine.engine, None
        layers, stage = saved_size(folder / name), engine.zero_optimization_stage()
        if stage == 0 and layers != self._tp_size:
            raise CheckpointError(
                f"{folder}: was saved with tp_size={layers}, this run has tp_size={self._tp_size}: set it to {layers}"
            )
        if stage == 0 or (processes == self.state.num_processes and layers == self._tp_size):
            path, _ = engine.load_checkpoint(str(folder), name)
        else:
            logger.warning(
                f"{folder} was saved by {processes} process(es): converting it to DeepSpeed's universal format"
            )
            with universal_format(folder / name, self.state) as universal, self._whole_layers():
                engine._config.load_universal_checkpoint = True
                try:
                    path, _ = engine.load_checkpoint(str(universal.parent), universal.name)
                finally:
                    engine._config.load_universal_checkpoint = False
        if path is None:
            raise CheckpointError(f"{folder / name}: DeepSpeed found no checkpoint to load")

    def _whole_layers(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sequences is None else self._sequences.whole_layers()

    def drop_held_gradients(self) -> None:
        """See `Strategy.drop_held_gradients`; the next backward pass begins a window."""
        if self.engine is not None:
            self.engine.drop_gradients()

    def model_state(self, model: nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """See `Strategy.model_state`; split layers, and parameters of stage 3, are gathered module by module.

        Raises `ArgumentError` at stage 3 without ``zero3_save_16bit_model``.
        """
        unwrapped = self.unwrap(model)
        if _is_partitioned(unwrapped) and not self._plugin_of(model).zero3_save_16bit_model:
            raise ArgumentError(
                "weights of a model at stage 3 are gathered only with DeepSpeedPlugin(zero3_save_16bit_model=True), "
                "--zero3_save_16bit_model true, or stage3_gather_16bit_weights_on_model_save in its configuration"
            )
        if self._tp_size > 1 or _is_partitioned(unwrapped):
            return gathered_state(unwrapped, keep=self.state.is_local_main_process)
        return super().model_state(model, full)

    def release(self) -> None:
        """Destroy the engine."""
        if self.engine is not None:
            self.engine.engine.destroy()
        if self._sequences is not None:
            self._sequences.release()
        if self._tp_size > 1:
            release_groups()
        self.engine = self._sequences = None


def _is_partitioned(model: nn.Module) -> bool:
    """Return True if `deepspeed.zero.Init` has sharded ``model``."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


def _is_zero3(plugin: DeepSpeedPlugin) -> bool:
    return bool(plugin.hf_ds_config.is_zero3())
