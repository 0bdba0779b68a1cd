"""What a script may say about how it wants to train: one dataclass a topic, each with working defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.enums import DDPCommunicationHookType
from accel.errors import ArgumentError, one_of
from accel.kwargs import KwargsHandler as KwargsHandler
from accel.training.compile import TorchDynamoPlugin as TorchDynamoPlugin
from accel.training.profiling import ProfileKwargs as ProfileKwargs
from accel.world.project_root import under_root

if TYPE_CHECKING:
    from accel.fp8_recipes import AORecipeKwargs as AORecipeKwargs
    from accel.fp8_recipes import FP8RecipeKwargs as FP8RecipeKwargs
    from accel.fp8_recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
    from accel.fp8_recipes import TERecipeKwargs as TERecipeKwargs

RECIPES = ("AORecipeKwargs", "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs")


def __getattr__(name: str) -> Any:
    # Their module looks for libraries, which a script that trains in 16 or 32 bits need not wait for.
    if name in RECIPES:
        from accel import fp8_recipes

        return getattr(fp8_recipes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass
class AutocastKwargs(KwargsHandler):
    """How `Accelerator.autocast` and the forward of prepared models enter `torch.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Keyword arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hooks = DDPCommunicationHookType.list()
        one_of(str(self.comm_hook), hooks, what="DistributedDataParallelKwargs(comm_hook=…)")
        wrappers = ["no", "fp16", "bf16"]
        one_of(str(self.comm_wrapper), wrappers, what="DistributedDataParallelKwargs(comm_wrapper=…)")

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The fields that torch's class takes."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Give ``model``, a `DistributedDataParallel`, the communication hook asked for."""
        from accel.parallel.ddp import compress

        compress(model, self)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Keyword arguments of `torch.amp.GradScaler`, used with ``mixed_precision="fp16"``."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Keyword arguments of `torch.distributed.init_process_group`; ``backend=None`` takes the device's own."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How gradients are accumulated.

    ``num_steps`` batches (without it 1) make one optimizer step. With ``sync_with_dataloader`` the last batch of a
    loader always ends the step, and a window made short by it is scaled by its own length. ``sync_each_batch`` lets
    DDP exchange gradients at every batch: slower, less memory. ``adjust_scheduler`` counts the batches between steps
    in the scheduler's step count.
    """

    num_steps: int = None  # type: ignore[assignment]
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = 1
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ArgumentError(f"gradient accumulation steps must be a whole number from 1 on, got {self.num_steps!r}")


@dataclass
class DataLoaderConfiguration:
    """How data loaders are shared out among the processes.

    ``split_batches``: the loader's batch size is that of all processes together (else of each one).
    ``even_batches``: a last round that does not reach every process is completed with samples from the start of the
    epoch; `Accelerator.gather_for_metrics` drops them again.
    ``use_seedable_sampler``: shuffling depends on ``data_seed`` and the epoch alone.
    ``use_stateful_dataloader``: a loader that was saved in mid-epoch goes on by itself after ``load_state``; without it
    the script skips what it has seen with ``skip_first_batches``.
    ``non_blocking``: copies to the device do not wait; only useful with pinned memory.
    ``dispatch_batches``: the main process reads for all and sends each its part; ``None``: for iterable data sets only.
    ``already_sharded``: each process's loader has its own share already, and is not shared out again.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    already_sharded: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.already_sharded and (self.dispatch_batches or self.split_batches):
            other = "dispatch_batches" if self.dispatch_batches else "split_batches"
            raise ArgumentError(
                f"DataLoaderConfiguration(already_sharded=True, {other}=True): each process has its own share already, "
                f"so there is nothing to share out: leave one of the two out"
            )


@dataclass
class ProjectConfiguration:
    """Where a run keeps its files, and how checkpoints are named.

    With ``automatic_checkpoint_naming``, ``save_state()`` writes ``project_dir/checkpoints/checkpoint_<iteration>`` and
    keeps the newest ``total_limit`` of them. ``save_on_each_node``: the nodes share no file system, so that each one
    keeps a whole copy. Where the environment variable ``ACCEL_PROJECT_ROOT`` is set, that is so for checkpoints, and
    relative directories lie under it.
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ArgumentError(f"ProjectConfiguration(total_limit={self.total_limit}): at least 1 must be kept")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` too where none was given."""
        self.project_dir = under_root(project_dir)
        self.logging_dir = self.project_dir if self.logging_dir is None else under_root(self.logging_dir)

    @property
    def checkpoints(self) -> Path:
        """The folder that holds automatically named checkpoints. Raises `ArgumentError` without a project directory."""
        if self.project_dir is None:
            raise ArgumentError("automatic_checkpoint_naming needs a project_dir: give Accelerator(project_dir=…)")
        return Path(self.project_dir) / "checkpoints"
