"""Training by megatron-core: its pipelines, `DistributedDataParallel`, optimizer and checkpoints.

Imports megatron-core when a run uses it, and no other module of accel does.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from accel import collectives
from accel.data.loader import PreparedLoader
from accel.data.torch_loader import set_attributes
from accel.errors import ArgumentError, StateError
from accel.parallel.base import Loading, Prepared, Strategy
from accel.parallel.megatron_core import (
    Schedule,
    check_config,
    core_of,
    initialise,
    optimizer_settings,
    schedule_settings,
    seed,
)
from accel.parallel.megatron_engine import GPTTrainStep, MegatronEngine, output_class
from accel.parallel.megatron_state import load, save, whole_weights
from accel.plugins.megatron import MegatronLMDummyScheduler, MegatronLMPlugin
from accel.precision.base import Precision
from accel.state import AcceleratorState, GradientState

_CLIPPING = "MegatronLMPlugin(gradient_clipping=…) or --megatron_lm_gradient_clipping"


class Megatron(Strategy):
    """One model of megatron-core, and its optimizer, over data, tensor, pipeline, context and expert parallelism."""

    joins = True
    lockstep = "with megatron-core"
    compiles_in_place = True
    shards_models = True
    is_engine = True
    state: AcceleratorState

    def __init__(self, state: AcceleratorState) -> None:
        super().__init__(state)
        plugin = state.megatron_lm_plugin
        if plugin is None:
            raise StateError("megatron-core: the state was reset: make a new Accelerator")
        self.plugin: MegatronLMPlugin = plugin
        self._parallel_state = initialise(state, plugin)
        # The first process of each data share, in the order of the shares.
        shares = collectives.gather_object([self.data_place[1]])
        self._first = [shares.index(share) for share in range(self.data_place[0])]
        self._engine: MegatronEngine | None = None
        self.optimizer: Any = None
        self._script_optimizer: torch.optim.Optimizer | None = None  # whose learning rate torch's schedulers set
        self._settings: dict[str, Any] = {}
        self._complete = False  # if the gradients of a window wait for their step
        self._skipped = False
        self._norm = 0.0

    @property
    def data_place(self) -> tuple[int, int]:
        """See `Strategy.data_place`."""
        groups = self._parallel_state
        return groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()

    def _one_of_each_share(self, rows: torch.Tensor, dimensions: int) -> torch.Tensor:
        parts = rows.chunk(self.state.num_processes)
        return torch.cat([parts[rank] for rank in self._first]) if len(rows) else rows

    def gather_objects(self, items: Any) -> Any:
        """See `Strategy.gather_objects`."""
        return collectives.gather_object(items if self.state.process_index in self._first else [])

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return ``loader`` with the rows of all micro-batches in a batch, as at Accelerate.

        Raises `ArgumentError` for a loader with batches of its own.
        """
        count = self.plugin.num_micro_batches
        if count == 1 or isinstance(loader, PreparedLoader):
            return loader
        sampler: Any = loader.batch_sampler
        if loader.batch_size is None or type(sampler) is not BatchSampler:
            raise ArgumentError(
                f"prepare: with MegatronLMPlugin(num_micro_batches={count}) a loader needs a batch_size, and no batch "
                "sampler of its own"
            )
        size = loader.batch_size * count
        loader = copy.copy(loader)
        set_attributes(loader, batch_size=size, batch_sampler=BatchSampler(sampler.sampler, size, sampler.drop_last))
        return loader

    def place(self, model: nn.Module, evaluation: bool = False) -> nn.Module:
        """Leave a model where it is that ``custom_model_provider_function`` replaces."""
        replaced = self.plugin.custom_model_provider_function is not None and not evaluation
        return model if replaced else super().place(model)

    def prepare(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any] = (),
        loading: Loading | None = None,
    ) -> Prepared:
        """Return the engine for the model, megatron-core's optimizer, and its schedule for a placeholder.

        Raises `ArgumentError` for a second model, for a model or an optimizer that comes without the other, and for
        those that megatron-core cannot train.
        """
        loading = loading or Loading()
        if models or optimizers:
            if self._engine is not None or len(models) != 1 or len(optimizers) != 1:
                raise ArgumentError(
                    "prepare: an Accelerator with a model of megatron-core trains one model by one optimizer: pass the "
                    "two in one call"
                )
            self._begin(models[0], optimizers[0], loading)
        return Prepared(
            [self._engine for _ in models if self._engine is not None],
            [self.optimizer] * len(optimizers),
            [self._schedule(item, loading) for item in schedulers],
        )

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer, loading: Loading) -> None:
        super().prepare([], [optimizer])  # refuses a placeholder of DeepSpeed's
        plugin, precision = self.plugin, self.state.mixed_precision
        settings, wrapper, all_decay = optimizer_settings(plugin, optimizer, precision)
        base_model = self._build(model)
        config = base_model.config
        check_config(config, plugin, precision)
        base_model = base_model.to(self.state.device)
        if precision in ("fp16", "bf16"):
            base_model = core_of("transformer.module").Float16Module(config, base_model)
        distributed = core_of("distributed")
        chunk = distributed.DistributedDataParallel(
            config, distributed.DistributedDataParallelConfig(**wrapper), base_model
        )
        chunk.broadcast_params()
        optimization = core_of("optimizer")
        self.optimizer = optimization.get_megatron_optimizer(
            optimization.OptimizerConfig(**settings), [chunk], config_overrides={} if all_decay else None
        )
        for group in self.optimizer.param_groups:  # which megatron-core leaves to its own schedule
            group["weight_decay"] = settings["weight_decay"] * group["wd_mult"]
        config.grad_scale_func = self.optimizer.scale_loss
        self._settings, self._script_optimizer = settings, optimizer
        kind = plugin.custom_train_step_class
        step = GPTTrainStep() if kind is None else kind(self._arguments(), **(plugin.custom_train_step_kwargs or {}))
        self._engine = MegatronEngine(chunk, step, plugin.num_micro_batches, output_class(model))
        if loading.batch_sizes:
            choose = min if plugin.is_train_batch_min else max
            plugin.data_parallel_size = self.data_place[0]
            plugin.micro_batch_size = choose(loading.batch_sizes) // plugin.num_micro_batches
            plugin.global_batch_size = choose(loading.batch_sizes) * plugin.data_parallel_size

    def _build(self, model: nn.Module) -> Any:
        """Return the model to train: ``model`` itself, or the model that the plug-in's function returns."""
        provider, plugin = self.plugin.custom_model_provider_function, self.plugin
        kind = core_of("transformer.module").MegatronModule
        seed()
        if provider is None:
            if not isinstance(model, kind):
                raise ArgumentError(
                    f"prepare: {type(model).__name__} is no MegatronModule, but this run's processes are in groups of "
                    "megatron-core: pass MegatronLMPlugin(custom_model_provider_function=…), or do not initialise "
                    "parallel_state"
                )
            return model
        groups = self._parallel_state
        with _one_line("custom_model_provider_function"):
            if plugin.custom_prepare_model_function is not None:
                built = plugin.custom_prepare_model_function(provider)
            else:
                built = provider(
                    pre_process=groups.is_pipeline_first_stage(), post_process=groups.is_pipeline_last_stage()
                )
        (built,) = built if isinstance(built, (list, tuple)) else (built,)
        if not isinstance(built, kind) or hasattr(built, "module"):
            raise ArgumentError(
                "custom_model_provider_function, or custom_prepare_model_function, must return one MegatronModule "
                f"without wrappers, not {type(built).__name__}"
            )
        return built

    def _arguments(self) -> SimpleNamespace:
        """Return the first argument of ``custom_train_step_class``."""
        return SimpleNamespace(**vars(self.plugin))

    def _schedule(self, item: Any, loading: Loading) -> Any:
        if not isinstance(item, MegatronLMDummyScheduler):
            super().prepare([], [], [item])
            return item
        if self.optimizer is None:
            raise ArgumentError("prepare: pass a MegatronLMDummyScheduler with or after its model and optimizer")
        self._script_optimizer = None  # the schedule sets megatron-core's groups
        at_once = 1 if loading.split_batches else self.data_place[0]
        return Schedule(self.optimizer, schedule_settings(self.plugin, item, self._settings, at_once))

    def compile(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        """Compile the model inside the engine ``model``."""
        if model is not self._engine:
            return super().compile(model, **kwargs)
        self._engine.module.compile(**kwargs)
        return model

    def backward(self, loss: torch.Tensor, length: int, last: bool, precision: Precision, **kwargs: Any) -> None:
        """Reduce the gradients, which the forward pass has computed, if they complete a window."""
        if self._engine is None:
            raise StateError("backward: with a model of megatron-core, prepare it and its optimizer first")
        if last and not self._engine.deferred:
            self._engine.finish(length)
            self._complete = True

    def step(
        self, optimizer: Any, precision: Precision, closure: Callable[[], Any] | None = None
    ) -> bool | list[torch.Tensor]:
        """Clip and step, unless `clip_grad_norm` has already; return True if gradients overflowed."""
        if closure is not None:
            raise ArgumentError("step(closure): megatron-core's optimizer has no closures: call step() without one")
        if self._complete:
            self._complete = False
            if self._script_optimizer is not None:
                rate = self._script_optimizer.param_groups[0]["lr"]
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            stepped, norm, _ = self.optimizer.step()
            self._skipped, self._norm = not stepped, float(norm or 0.0)
        return self._skipped

    def zero_grad(self, optimizer: Any, **kwargs: Any) -> None:
        """Clear the gradients."""
        if self._engine is not None:
            self._engine.zero_grad()
            self.optimizer.zero_grad()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Reduce no gradients in the block."""
        if self._engine is None:
            raise StateError("no_sync: with a model of megatron-core, prepare it and its optimizer first")
        self._engine.deferred += 1
        try:
            yield
        finally:
            self._engine.deferred -= 1

    def clip_grad_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Step, which clips, and return the norm of the gradients before; the next `step` does nothing.

        Raises `ArgumentError` for another norm than the plug-in's, and `StateError` in the middle of a window.
        """
        clipping = self.plugin.gradient_clipping
        if float(max_norm) != float(clipping) or norm_type != 2:
            raise ArgumentError(
                f"clip_grad_norm_({max_norm}, norm_type={norm_type}): megatron-core clips in its own step, in this run "
                f"to a 2-norm of {clipping}: set {_CLIPPING}"
            )
        if not self._complete or not GradientState().sync_gradients:
            raise StateError(
                "clip_grad_norm_ before backward, or in the middle of an accumulation window: put it after backward, "
                "under `if accelerator.sync_gradients:`"
            )
        self.step(self.optimizer, Precision(self.state.device))
        return torch.tensor(self._norm, device=self.state.device)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Raise `ArgumentError`: megatron-core clips norms only."""
        raise ArgumentError(f"clip_grad_value_: megatron-core clips norms only: set {_CLIPPING}")

    def drop_held_gradients(self) -> None:
        """See `Strategy.drop_held_gradients`."""
        self._complete = False
        self.zero_grad(self.optimizer)

    def saves(self, item: Any) -> bool:
        """See `Strategy.saves`."""
        return self._engine is not None and (item is self._engine or getattr(item, "optimizer", None) is self.optimizer)

    def save_engine(self, folder: Path, name: str) -> None:
        """See `Strategy.save_engine`; ``dist_checkpointing`` writes the files."""
        assert self._engine is not None
        save(folder / name, self._engine.base_model, None if self.plugin.no_save_optim else self.optimizer)

    def load_engine(self, folder: Path, name: str, processes: int) -> None:
        """See `Strategy.load_engine`."""
        assert self._engine is not None
        load(folder / name, self._engine.base_model, self.optimizer, not self.plugin.no_load_optim)
        if self._script_optimizer is not None:
            for group in self._script_optimizer.param_groups:
                group["lr"] = self.optimizer.param_groups[0]["lr"]

    def model_state(self, model: nn.Module, full: bool = True) -> dict[str, torch.Tensor]:
        """See `Strategy.model_state`; layers have their numbers in the complete model."""
        if model is not self._engine:
            return super().model_state(model, full)
        return whole_weights(self._engine.module, self.state)

    def release(self) -> None:
        """Drop the engine."""
        self._engine, self.optimizer, self._script_optimizer = None, None, None
        self._complete = False


@contextmanager
def _one_line(source: str) -> Iterator[None]:
    """Raise megatron-core's complaints about sizes, such as layers that stages do not divide, in one line."""
    try:
        yield
    except (AssertionError, ValueError) as error:
        module = traceback.extract_tb(error.__traceback__)[-1].filename
        if "/megatron/core/" not in module:
            raise
        message = " ".join(str(error).split()) or "an assertion of megatron-core failed"
        raise ArgumentError(f"{source}: {message}") from error
