"""Plug-ins, the options of a training script: one dataclass a topic, each with working defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.enums import DDPCommunicationHookType, DynamoBackend
from accel.errors import ArgumentError, nearest, one_of
from accel.fp8_recipes import AORecipeKwargs as AORecipeKwargs
from accel.fp8_recipes import FP8RecipeKwargs as FP8RecipeKwargs
from accel.fp8_recipes import MSAMPRecipeKwargs as MSAMPRecipeKwargs
from accel.fp8_recipes import TERecipeKwargs as TERecipeKwargs
from accel.kwargs import KwargsHandler as KwargsHandler
from accel.world.environment import read_flag, under_project_root

if TYPE_CHECKING:
    from torch.profiler import ProfilerActivity, profile

ACTIVITIES = ("cpu", "xpu", "mtia", "cuda", "hpu")
_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")
_DYNAMO = "ACCELERATE_DYNAMO_"
_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast` in `Accelerator.autocast` and in the forward of prepared models."""

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
        one_of(str(self.comm_hook), hooks, source="DistributedDataParallelKwargs(comm_hook=…)")
        wrappers = ["no", "fp16", "bf16"]
        one_of(str(self.comm_wrapper), wrappers, source="DistributedDataParallelKwargs(comm_wrapper=…)")

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields that torch's class accepts."""
        return {name: value for name, value in super().to_dict().items() if name not in ignore_keys}

    def register_comm_hook(self, model: Any) -> None:
        """Register the configured communication hook with ``model``, a `DistributedDataParallel`.

        Raises `ArgumentError` if torch's own hook is broken.
        """
        kind, wrapper = str(self.comm_hook), str(self.comm_wrapper)
        if kind == "no":
            return
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        hooks: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "power_sgd": powerSGD_hook.powerSGD_hook,
            "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
        }
        wrappers: dict[str, Any] = {
            "fp16": default_hooks.fp16_compress_wrapper,
            "bf16": default_hooks.bf16_compress_wrapper,
        }
        is_power_sgd = kind.endswith("power_sgd")
        state = powerSGD_hook.PowerSGDState(None, **self.comm_state_option) if is_power_sgd else None
        if kind == "batched_power_sgd" and not _orthogonalizes(powerSGD_hook):
            raise ArgumentError(f"comm_hook={kind!r} does not work in torch {torch.__version__}: use 'power_sgd'")
        hook = wrappers.get(wrapper, lambda hook: hook)(hooks[kind])
        model.register_comm_hook(state, _unnamed(hook) if "bf16" in (kind, wrapper) else hook)


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
    """Keyword arguments of `torch.distributed.init_process_group`; ``backend=None`` selects the device's own."""

    backend: str | None = None
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    ``num_steps``: batches per optimizer step (default: 1).
    ``adjust_scheduler``: count the batches between steps in the scheduler's step count.
    ``sync_with_dataloader``: a loader's last batch always ends the step; a window that it shortens is scaled by
        its own length.
    ``sync_each_batch``: DDP exchanges gradients at every batch: slower, less memory.
    """

    num_steps: int = None  # type: ignore[assignment]
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = 1
        if not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ArgumentError(f"gradient accumulation steps must be a positive integer, got {self.num_steps!r}")


@dataclass
class DataLoaderConfiguration:
    """Distribution of data loaders over the processes.

    ``split_batches``: the loader's batch size is that of all processes together (else of each one).
    ``dispatch_batches``: the main process reads for all and sends each its part; ``None``: for iterable data sets
        only.
    ``even_batches``: complete an uneven last round with samples from the start of the epoch;
        `Accelerator.gather_for_metrics` drops them again.
    ``use_seedable_sampler``: shuffling depends only on ``data_seed`` and the epoch.
    ``non_blocking``: copies to the device do not wait; only useful with pinned memory.
    ``use_stateful_dataloader``: a loader saved in mid-epoch resumes by itself after ``load_state``; without it
        the script skips what it has seen with ``skip_first_batches``.
    ``already_sharded``: each process's loader already has its own share and is not split again.
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
            flag = "dispatch_batches" if self.dispatch_batches else "split_batches"
            raise ArgumentError(
                f"DataLoaderConfiguration(already_sharded=True, {flag}=True): each process already has its share: "
                "remove one of the two"
            )


@dataclass
class ProjectConfiguration:
    """The directories of a run, and the naming of its checkpoints.

    ``automatic_checkpoint_naming``: ``save_state()`` writes ``project_dir/checkpoints/checkpoint_<iteration>``
        and keeps the newest ``total_limit``.
    ``save_on_each_node``: each node keeps a complete copy, as the nodes share no file system.

    If the environment variable ``ACCEL_PROJECT_ROOT`` is set, each node keeps its own checkpoints, and relative
    directories are below that root.
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
        """Set ``project_dir``, and also ``logging_dir`` if it is not set."""
        self.project_dir = under_project_root(project_dir)
        self.logging_dir = self.project_dir if self.logging_dir is None else under_project_root(self.logging_dir)

    @property
    def checkpoints(self) -> Path:
        """The folder of automatically named checkpoints. Raises `ArgumentError` without a project directory."""
        if self.project_dir is None:
            raise ArgumentError("automatic_checkpoint_naming needs a project_dir: pass Accelerator(project_dir=…)")
        return Path(self.project_dir) / "checkpoints"


@dataclass
class ProfileKwargs(KwargsHandler):
    """Settings of `Accelerator.profile`. Fields not listed here are those of `torch.profiler.profile`.

    ``activities``: some of cpu, cuda, xpu, mtia and hpu (default: all that torch supports here).
    ``schedule_option``: arguments of `torch.profiler.schedule`, such as ``{"wait": 1, "warmup": 1, "active":
        3}``; the script then calls ``profiler.step()`` after each step.
    ``on_trace_ready``: called with the profiler at the end of each cycle of the schedule.
    ``output_trace_dir``: the directory for every process's trace, in Chrome's format.

    Raises `ArgumentError` for an unknown activity or part of a schedule.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        for activity in self.activities or ():
            one_of(activity, ACTIVITIES, source="ProfileKwargs(activities=…)")
        for name in self.schedule_option or ():
            if name not in _SCHEDULE:
                known = ", ".join(_SCHEDULE)
                raise ArgumentError(
                    f"ProfileKwargs(schedule_option=…): {name!r} is not one of {known}{nearest(name, _SCHEDULE)}"
                )

    def build(self) -> profile:
        """Return the profiler, not started. Raises `ArgumentError` for an activity that this torch lacks."""
        from torch.profiler import profile, schedule

        return profile(
            activities=None if self.activities is None else [_activity(name) for name in self.activities],
            schedule=None if self.schedule_option is None else schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Settings for compiling prepared models. ``backend="no"``, the default, compiles none.

    ``mode``, ``fullgraph``, ``dynamic``, ``options``, ``disable``: those of `torch.compile`.
    ``use_regional_compilation``: compile the repeated blocks of a model, each kind once, instead of the whole
        model.

    Missing values are read from ``ACCELERATE_DYNAMO_BACKEND``, ``_MODE``, ``_USE_FULLGRAPH``, ``_USE_DYNAMIC``
    and ``_USE_REGIONAL_COMPILATION``. Raises `ArgumentError` for an unknown backend or mode, and for a mode with
    options.
    """

    backend: DynamoBackend | str = None  # type: ignore[assignment]
    mode: str = None  # type: ignore[assignment]
    fullgraph: bool = None  # type: ignore[assignment]
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        env = os.environ
        explicit = self.backend is not None
        name = str(self.backend if explicit else env.get(_DYNAMO + "BACKEND") or "no").upper()
        source = "TorchDynamoPlugin(backend=…)" if explicit else f"environment variable {_DYNAMO}BACKEND"
        self.backend = DynamoBackend(one_of(name, DynamoBackend.list(), source=source))
        if self.mode is None:
            self.mode = env.get(_DYNAMO + "MODE") or "default"
        one_of(self.mode, _DYNAMO_MODES, source="TorchDynamoPlugin(mode=…)")
        if self.options and self.mode != "default":
            raise ArgumentError(f"TorchDynamoPlugin: pass mode={self.mode!r} or options, not both")
        if self.fullgraph is None:
            self.fullgraph = read_flag(env, _DYNAMO + "USE_FULLGRAPH")
        if self.dynamic is None and _DYNAMO + "USE_DYNAMIC" in env:
            self.dynamic = read_flag(env, _DYNAMO + "USE_DYNAMIC")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = read_flag(env, _DYNAMO + "USE_REGIONAL_COMPILATION")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of every field by name; the backend is in the spelling of `torch.compile`."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of `torch.compile`."""
        return {name: value for name, value in super().to_kwargs().items() if name != "use_regional_compilation"}

    def default_values(self) -> dict[str, Any]:
        """Return the defaults of `torch.compile`; the backend ``"no"`` is accel's own."""
        return {
            "backend": "no",
            "mode": "default",
            "fullgraph": False,
            "dynamic": None,
            "options": None,
            "disable": False,
            "use_regional_compilation": False,
        }


def _orthogonalizes(hooks: Any) -> bool:
    """Return True if torch's own step accepts the single matrix of its batched hook, which 2.13 does not."""
    import torch

    try:
        hooks._orthogonalize(torch.eye(2))
    except AssertionError:
        return False
    return True


def _unnamed(hook: Any) -> Any:
    import torch

    # torch accepts hooks with bf16 in their names only with NCCL, although Gloo can add bf16 too.
    if torch.distributed.get_backend() != "gloo":
        return hook
    return lambda state, bucket: hook(state, bucket)


def _activity(name: str) -> ProfilerActivity:
    from torch.profiler import ProfilerActivity, supported_activities

    supported: set[ProfilerActivity] = supported_activities()  # type: ignore[no-untyped-call]
    by_name = {activity.name.lower(): activity for activity in supported}
    match = by_name.get(name)
    if match is None and name == "cuda":
        return ProfilerActivity.CUDA  # without CUDA, torch itself warns and records nothing
    if match is None:
        raise ArgumentError(
            f"ProfileKwargs(activities=…): this build of torch cannot record {name!r}, only {list(by_name)}"
        )
    return match
