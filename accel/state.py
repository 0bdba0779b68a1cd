"""Which process, device and world this is, and where in a gradient accumulation window.

Each class is a view of one state shared by the whole process: making another instance is cheap and shows the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from accel import world as worlds
from accel.enums import DistributedType, PrecisionType
from accel.environment import World, read_flag, read_world
from accel.errors import ArgumentError, StateError, nearest, one_of
from accel.plugins import GradientAccumulationPlugin
from accel.sharing import share_of

if TYPE_CHECKING:
    from accel.data.loader import DataLoaderShard

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = ("backend", "init_method", "timeout")


class PartialState:
    """The process, its device and its world; needs no `Accelerator`.

    ``PartialState()`` reads the environment once. With ``WORLD_SIZE`` above 1 it forms the world (gloo on CPU, NCCL
    on CUDA) or raises `WorldError`. ``cpu=True`` or ``ACCELERATE_USE_CPU=1`` keeps to the CPU where there are other
    devices. ``backend``, ``init_method`` and ``timeout`` are passed to `torch.distributed.init_process_group`.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    backend: str | None
    distributed_type: DistributedType
    num_processes: int
    process_index: int
    local_process_index: int
    is_main_process: bool
    is_local_main_process: bool
    is_last_process: bool
    use_distributed: bool
    debug: bool
    fork_launched: bool
    _cpu: bool

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        self.__dict__ = PartialState._shared_state
        if not self.initialized:
            self._begin(cpu, kwargs)
        elif cpu and self.device.type != "cpu":
            raise StateError(
                f"cpu=True was asked after this process took {self.device}: make the first state with cpu=True"
            )

    def _begin(self, cpu: bool, options: dict[str, Any]) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise ArgumentError(f"PartialState({name}=…) is unknown{nearest(name, _OPTIONS)}")
        env = os.environ
        world = worlds.adopted_world() or read_world(env, needs_master=not options.get("init_method"))
        device = worlds.choose_device(world, env, cpu=cpu)
        worlds.use_device(device)
        backend = worlds.form(world, device, options) if world.size > 1 else None
        self._cpu = device.type == "cpu"
        self.debug = read_flag(env, "ACCELERATE_DEBUG_MODE")
        self.fork_launched = read_flag(env, "FORK_LAUNCHED")
        self._settle(world, device, backend)

    def _settle(self, world: World, device: torch.device, backend: str | None) -> None:
        self.backend = backend
        self.num_processes = world.size
        self.process_index = world.rank
        self.local_process_index = world.local_rank
        self.use_distributed = world.size > 1
        self.is_main_process = world.rank == 0
        self.is_local_main_process = world.local_rank <= 0
        self.is_last_process = world.rank == world.size - 1
        kind = worlds.BACKENDS.get(device.type, worlds.BACKENDS["cpu"])[1]
        self.distributed_type = kind if self.use_distributed else DistributedType.NO
        self.device = device

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__annotations__ or name in PartialState.__annotations__:
            raise AttributeError(
                f"{type(self).__name__}.{name}: the state was reset, make a new Accelerator or {type(self).__name__}"
            )
        known = {*dir(type(self)), *PartialState.__annotations__}
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{nearest(name, known)}")

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    @staticmethod
    def _reset_state() -> None:
        PartialState._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether the environment has been read."""
        return "device" in PartialState._shared_state

    @property
    def default_device(self) -> torch.device:
        """The best kind of device of this machine, whatever this process uses."""
        return torch.device(worlds.default_device_type())

    def set_device(self) -> None:
        """Make this process's device the current one of its kind."""
        worlds.use_device(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """End ``group``, or the whole world. Calling it twice is no error."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        else:
            worlds.destroy()

    def wait_for_everyone(self) -> None:
        """Return when every process of the world has called this as often as this one."""
        if self.use_distributed:
            worlds.barrier(self.device)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block first, the others when it is through."""
        yield from self._goes_first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The main process of each node runs the block first, the others when they are through."""
        yield from self._goes_first(self.is_local_main_process)

    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        yield
        if first:
            self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of a list, tuple, string, tensor, or dict of these, in order.

        Shares differ by one at most, the first processes having more; with ``apply_padding`` the last item of a
        share is repeated until all are as long as the longest. Raises `ArgumentError` for a dict of unequal lengths.
        """
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)

    def on_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs on the main process only, and returns ``None`` elsewhere."""
        return self._only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Function:
        """Decorate a function so that it runs on the main process of each node only."""
        return self._only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorate a function so that it runs on the last process only."""
        return self._only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorate a function so that it runs on process ``process_index`` only (without it: on every process)."""
        return self._only(lambda: process_index is None or self.process_index == process_index, function)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorate a function so that it runs on process ``local_process_index`` of each node only."""
        return self._only(
            lambda: local_process_index is None or self.local_process_index == local_process_index, function
        )

    def _only(self, wanted: Callable[[], bool], function: Function | None) -> Function:
        if function is None:
            return cast(Function, partial(self._only, wanted))

        @wraps(function)
        def run_where_wanted(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if wanted() else None

        return cast(Function, run_where_wanted)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on the main process of each node only."""
        if self.is_local_main_process:
            print(*args, **kwargs)


class AcceleratorState(PartialState):
    """`PartialState` and the precision that the run was asked to use.

    ``mixed_precision`` is ``"no"``, ``"bf16"`` or ``"fp16"``; without it ``ACCELERATE_MIXED_PRECISION`` counts. Raises
    `StateError` when it is asked for with another precision than the first time.
    """

    _shared_state: ClassVar[dict[str, Any]] = PartialState._shared_state

    _mixed_precision: str

    def __init__(self, mixed_precision: str | None = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu, **kwargs)
        if "_mixed_precision" not in self.__dict__:
            self._mixed_precision = _asked_precision(mixed_precision)
        elif mixed_precision is not None and str(mixed_precision) != self._mixed_precision:
            raise StateError(
                f"mixed_precision={str(mixed_precision)!r} was asked after this process took "
                f"{self._mixed_precision!r}: give it to the first Accelerator or AcceleratorState"
            )

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self._mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            PartialState._shared_state.clear()
        PartialState._shared_state.pop("_mixed_precision", None)

    @property
    def initialized(self) -> bool:
        """Whether the environment has been read."""
        return "device" in PartialState._shared_state

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._mixed_precision


def _asked_precision(given: str | None) -> str:
    if given is not None:
        return one_of(str(given), PrecisionType.list(), what="mixed_precision")
    named = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    return one_of(named, PrecisionType.list(), what="environment variable ACCELERATE_MIXED_PRECISION")


class GradientState:
    """Where the process is in its accumulation window and in its data loaders.

    ``sync_gradients`` is true on the batch that ends a window: only then do optimizers step and gradients travel.
    """

    _shared_state: ClassVar[dict[str, Any]] = {}

    sync_gradients: bool
    plugin: GradientAccumulationPlugin
    dataloader_references: list[DataLoaderShard]

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self.__dict__ = GradientState._shared_state
        if not self.initialized:
            self.sync_gradients = True
            self.dataloader_references = []
            self.plugin = GradientAccumulationPlugin()
        if gradient_accumulation_plugin is not None:
            self.plugin = gradient_accumulation_plugin

    @property
    def initialized(self) -> bool:
        """Whether the state was made."""
        return "sync_gradients" in GradientState._shared_state

    @property
    def num_steps(self) -> int:
        """Batches in one accumulation window."""
        return self.plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """Whether batches between steps are counted in the scheduler's step count."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends the window."""
        return self.plugin.sync_with_dataloader

    @property
    def active_dataloader(self) -> DataLoaderShard | None:
        """The innermost prepared loader that is being iterated."""
        return self.dataloader_references[-1] if self.dataloader_references else None

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return bool(self.dataloader_references)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the active loader has given its last batch of this epoch."""
        active = self.active_dataloader
        return active is not None and active.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples in the last, incomplete round of the active loader: 0 if it is complete, -1 if not known."""
        active = self.active_dataloader
        return -1 if active is None else active.remainder

    def __repr__(self) -> str:
        return (
            f"Sync gradients: {self.sync_gradients}\nAt end of dataloader: {self.end_of_dataloader}\n"
            f"Extra samples: {self.remainder}\nGradient accumulation steps: {self.num_steps}\n"
        )

    def _add_dataloader(self, loader: DataLoaderShard) -> None:
        self.dataloader_references.append(loader)

    def _remove_dataloader(self, loader: DataLoaderShard) -> None:
        references = self.dataloader_references
        for index in range(len(references) - 1, -1, -1):
            if references[index] is loader:
                del references[index]
                return

    @staticmethod
    def _reset_state() -> None:
        GradientState._shared_state.clear()
