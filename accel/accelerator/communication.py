"""The parts of `Accelerator` for processes: ranks, barriers, printing, collectives and mesh dimensions."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from accel import collectives
from accel.accelerator.run import Part
from accel.data.rows import last_counts, without_repetitions
from accel.enums import DistributedType, FP8BackendType
from accel.errors import ArgumentError
from accel.fp8_recipes import AORecipeKwargs, FP8RecipeKwargs, TERecipeKwargs
from accel.plugins.deepspeed import DeepSpeedPlugin
from accel.plugins.parallelism import ParallelismConfig
from accel.pytree import collect

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.parallel.deepspeed_engine import DeepSpeedEngineWrapper


Function = TypeVar("Function", bound=Callable[..., Any])
Recipe = TypeVar("Recipe")


class ProcessControl(Part):
    """Ranks, barriers and collectives, delegated to `AcceleratorState` and `accel.collectives`."""

    flag_tensor: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return self.state.device

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of distributed run."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """The world size."""
        return self.state.num_processes

    @property
    def process_index(self) -> int:
        """This process's rank in the world."""
        return self.state.process_index

    @property
    def local_process_index(self) -> int:
        """This process's rank on its node."""
        return self.state.local_process_index

    @property
    def is_main_process(self) -> bool:
        """True on rank 0."""
        return self.state.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank 0 of a node."""
        return self.state.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """True on the highest rank."""
        return self.state.is_last_process

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """True if there is more than one process, each on an accelerator of its own."""
        return self.state.use_distributed and self.state.device.type != "cpu"

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``."""
        return self.state.mixed_precision

    def wait_for_everyone(self) -> None:
        """See `PartialState.wait_for_everyone`."""
        self.state.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """See `PartialState.main_process_first`."""
        return self.state.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """See `PartialState.local_main_process_first`."""
        return self.state.local_main_process_first()

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """See `PartialState.split_between_processes`."""
        return self.state.split_between_processes(inputs, apply_padding)

    def on_main_process(self, function: Function | None = None) -> Function:
        """See `PartialState.on_main_process`."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """See `PartialState.on_local_main_process`."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Function) -> Function:
        """See `PartialState.on_last_process`."""
        return self.state.on_last_process(function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """See `PartialState.on_process`."""
        return self.state.on_process(function, process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """See `PartialState.on_local_process`."""
        return self.state.on_local_process(function, local_process_index)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each node only."""
        self.state.print(*args, **kwargs)

    def gather(self, tensor: Any) -> Any:
        """See `accel.collectives.gather`."""
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop the samples that were repeated to complete the last round.

        With ``even_batches=False`` nothing is repeated, and a short last round is gathered as it is. Raises
        `CollectiveError` if a process has no batch in it.

        Tensors are gathered as by `gather`. Other data, or everything with ``use_gather_object``, must be lists of
        one object per sample, and are returned as one list in rank order.
        """
        loader = self.gradient_state.active_dataloader
        counts = None if loader is None else last_counts(loader)
        if counts is not None and len(counts) > self.strategy.data_place[0]:
            counts = counts[:: self.strategy.copies]  # the main process has sent a part to every process
        leaves: list[Any] = []
        collect(input_data, leaves)
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            if counts is not None and isinstance(input_data, (list, tuple)):
                input_data = input_data[: counts[self.strategy.data_place[1]]]
            return self.strategy.gather_objects(input_data)
        of_parts = self.strategy.copies > 1 and not any(leaf.ndim for leaf in leaves)
        if counts is None or loader is None or of_parts:
            return self.strategy.gather(input_data)
        sizes = None
        if not loader.even_batches and len(set(counts)) > 1:
            sizes = [own_sizes[:: self.strategy.copies] for own_sizes in collectives.sizes_by_process(leaves)]
            input_data = collectives.pad_across_processes(input_data)
        gathered = self.strategy.gather(input_data)
        return without_repetitions(gathered, counts, loader.last_rows(), loader.nominal_rows, sizes)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """See `accel.collectives.reduce`; sums by default."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """See `accel.collectives.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag that every process sees at its next `check_trigger`."""
        self.flag_tensor = torch.tensor(1, device=self.device)

    def check_trigger(self) -> bool:
        """Return True if any process set its flag since the last check; reset all flags. One collective."""
        flag = torch.tensor(0, device=self.device) if self.flag_tensor is None else self.flag_tensor
        self.flag_tensor = None
        return bool(collectives.reduce(flag, "sum").item())


# Mesh dimensions, and this process's ranks in them. Dimensions that this version does not have are of size 1.


class Dimensions(Part):
    """The device mesh of the run, and Accelerate's properties of features that this version does not have."""

    delayed_fp8_autocast = False
    msamp_recipe_handler = None
    has_lomo_optimizer = False

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected DeepSpeed plug-in; None in a run without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def deepspeed_engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """DeepSpeed's engine, with its ``engine`` and ``get_global_grad_norm``; None without one."""
        engine: DeepSpeedEngineWrapper | None = self.strategy.engine
        return engine

    @deepspeed_engine_wrapped.setter
    def deepspeed_engine_wrapped(self, engine: DeepSpeedEngineWrapper | None) -> None:
        self.strategy.engine = engine

    @property
    def deepspeed_config(self) -> dict[str, Any] | None:
        """The configuration of DeepSpeed's engine; None without one."""
        return None if self.strategy.engine is None else self.strategy.engine.config

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """The size of every dimension; ``None`` without sharding and without a `ParallelismConfig`."""
        return self.state.parallelism_config

    @property
    def torch_device_mesh(self) -> DeviceMesh | None:
        """The device mesh; ``None`` for data parallelism alone without a `ParallelismConfig`.

        Its dimensions are ``dp_replicate``, ``dp_shard``, ``cp``, ``sp`` and ``tp``, those of size 1 too. Flattened
        dimensions are ``mesh["dp"]``, ``mesh["dp_shard_cp"]`` and ``mesh["dp_cp"]``.
        """
        return self.state.device_mesh

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded, always with FSDP 2."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Alias of `is_fsdp2`."""
        return self.is_fsdp2

    @property
    def fp8_enabled(self) -> bool:
        """True if layers compute in 8 bits."""
        return self.fp8_backend != FP8BackendType.NO

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The library that computes in 8 bits; ``FP8BackendType.NO`` without."""
        return self.precision.fp8_backend

    @property
    def has_fp8_handler(self) -> bool:
        """Alias of `fp8_enabled`: without a recipe, the run has the default one."""
        return self.fp8_enabled

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The recipe, if it is of the older class for two libraries."""
        return _instance(self.precision.recipe, FP8RecipeKwargs)

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The recipe of torchao, if that computes in 8 bits."""
        return _instance(self.precision.recipe, AORecipeKwargs)

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The recipe of Transformer Engine, if that computes in 8 bits."""
        return _instance(self.precision.recipe, TERecipeKwargs)

    @property
    def should_save_model(self) -> bool:
        """True on local rank 0 of a node, which writes the full model."""
        return self.state.is_local_main_process

    @property
    def data_parallel_rank(self) -> int:
        """The index of the model replica that this process holds or shares."""
        return self.strategy.data_place[1] if self.state.device_mesh is None else self._rank("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The index of this process's shard in its replica; 0 without sharding."""
        return self._rank("dp_shard")

    def _rank(self, dimension: str) -> int:
        mesh = self.state.device_mesh
        return 0 if mesh is None else mesh.get_local_rank(dimension)

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's part of the layers that tensor parallelism splits; 0 without it."""
        return self._rank("tp")

    @property
    def pipeline_parallel_rank(self) -> int:
        """0: this version has no pipeline parallelism."""
        return 0

    @property
    def context_parallel_rank(self) -> int:
        """This process's part of a sequence in `maybe_context_parallel`; 0 without it."""
        return self._rank("cp")

    def deepspeed_ulysses_dl_adapter(self, dl: Any, model: Any) -> Any:
        """Return this process's parts of the batches of ``dl``; without ``sp_size``, ``dl`` itself.

        ``dl``: a loader that was prepared apart from ``model``, which must be prepared before this. Raises
        `ArgumentError` with ``sp_size`` and no DeepSpeed.
        """
        config = self.parallelism_config
        if config is not None and config.sp_enabled and self.deepspeed_plugin is None:
            raise ArgumentError(
                "deepspeed_ulysses_dl_adapter: sp_size is DeepSpeed's only with a deepspeed_plugin: pass one, or cut "
                "batches by maybe_context_parallel"
            )
        return self.strategy.split_loader(dl)


def _instance(recipe: Any, kind: type[Recipe]) -> Recipe | None:
    return recipe if isinstance(recipe, kind) else None
