"""The state of a process: its rank, device and world, and the requested precision.

Each class is a view of one state shared by the whole process: another instance is cheap and equal, on any
thread.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch

from accel.enums import DistributedType, PrecisionType
from accel.errors import ArgumentError, StateError, nearest, one_of
from accel.gradient_state import GradientState as GradientState
from accel.known_causes import explain_uncaught_exceptions
from accel.plugins.deepspeed import DeepSpeedPlugin, check_plugins, refusing_sharded_loads
from accel.plugins.megatron import MegatronLMPlugin
from accel.world import process_group as worlds
from accel.world import xla
from accel.world.environment import World, read_flag, read_world, torchrun_variables
from accel.world.hardware import avoid_unsafe_links, set_numa_affinity
from accel.world.split import share_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from accel.plugins.fsdp import FullyShardedDataParallelPlugin
    from accel.plugins.parallelism import ParallelismConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_OPTIONS = ("backend", "init_method", "timeout")
_init_lock = threading.RLock()


def is_initialized() -> bool:
    """Return True if an `AcceleratorState` exists, which an `Accelerator` creates."""
    return "_mixed_precision" in AcceleratorState._shared_state


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return ``None``."""


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
        if "device" not in self.__dict__:
            with _init_lock:
                if "device" not in self.__dict__:
                    self._begin(cpu, kwargs)
        elif cpu and self.device.type != "cpu":
            raise StateError(f"cpu=True: this process already uses {self.device}: create the first state with cpu=True")

    def _begin(self, cpu: bool, options: dict[str, Any]) -> None:
        for name in options:
            if name not in _OPTIONS:
                raise ArgumentError(f"PartialState({name}=…) is unknown{nearest(name, _OPTIONS)}")
        env = os.environ
        if xla.is_requested(env, cpu=cpu):
            self._begin_on_xla(options)
            return
        explain_uncaught_exceptions()
        world = worlds.world_from_torch() or read_world(env, needs_master=not options.get("init_method"))
        device = worlds.choose_device(world, env, cpu=cpu)
        worlds.use_device(device)
        if read_flag(env, "ACCELERATE_CPU_AFFINITY"):
            set_numa_affinity(max(world.local_rank, 0))
        if world.size > 1 and "WORLD_SIZE" not in env:
            env.update(torchrun_variables(world))  # after mpirun: torch's env:// and libraries read these
        if world.size > 1 and device.type == "cuda":
            avoid_unsafe_links(device)
        backend = worlds.form(world, device, options) if world.size > 1 else None
        self._cpu = device.type == "cpu"
        self.debug = read_flag(env, "ACCELERATE_DEBUG_MODE")
        self.fork_launched = read_flag(env, "FORK_LAUNCHED")
        self._set_world(world, device, backend)

    def _begin_on_xla(self, options: dict[str, Any]) -> None:
        world, device = xla.join(os.environ)
        if world.size > 1:
            group_options = {"backend": xla.BACKEND, "init_method": xla.RENDEZVOUS, "timeout": options.get("timeout")}
            worlds.form(world, device, group_options)
        self._cpu = False
        self.debug = read_flag(os.environ, "ACCELERATE_DEBUG_MODE")
        self.fork_launched = read_flag(os.environ, "FORK_LAUNCHED")
        self._set_world(world, device, xla.BACKEND)
        self.distributed_type = DistributedType.XLA

    def _set_world(self, world: World, device: torch.device, backend: str | None) -> None:
        self.backend = backend
        self.num_processes = world.size
        self.process_index = world.rank
        self.local_process_index = world.local_rank
        self.use_distributed = world.size > 1
        self.is_main_process = world.rank == 0
        self.is_local_main_process = world.local_rank <= 0
        self.is_last_process = world.rank == world.size - 1
        self.distributed_type = worlds.kind_of(device) if self.use_distributed else DistributedType.NO
        self.device = device

    def __getstate__(self) -> dict[str, Any]:
        # `transformers.TrainingArguments` hold one and are saved with every model, where plugins do not belong.
        excluded = AcceleratorState.__annotations__ if type(self) is PartialState else {}
        return {name: value for name, value in vars(self).items() if name not in excluded}

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
        """True if the environment has been read."""
        return "device" in PartialState._shared_state

    @property
    def default_device(self) -> torch.device:
        """The best kind of device of this machine, regardless of the one in use."""
        return torch.device(worlds.default_device_type())

    def set_device(self) -> None:
        """Make this process's device the current one of its kind."""
        worlds.use_device(self.device)

    def destroy_process_group(self, group: Any = None) -> None:
        """Destroy ``group``, or the whole world. A second call is no error."""
        if group is not None:
            torch.distributed.destroy_process_group(group)
        else:
            worlds.destroy()

    def wait_for_everyone(self) -> None:
        """Wait until every process of the world has called this as often as this one."""
        if self.use_distributed and self.backend == xla.BACKEND:
            xla.barrier()
        elif self.use_distributed:
            worlds.barrier(self.device)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process first, then on the others."""
        yield from self._run_first(self.is_main_process)

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the main process of each node first, then on the others."""
        yield from self._run_first(self.is_local_main_process)

    def _run_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        plugins = self.__dict__.get("deepspeed_plugins")
        with refusing_sharded_loads(plugins) if self.use_distributed else nullcontext():
            yield
        if first:
            self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Yield each process's share of a list, tuple, string, tensor, or dict of these, in order.

        Shares differ by one at most, the first processes having more; with ``apply_padding`` the last item of a share
        is repeated until all are as long as the longest. Raises `ArgumentError` for a dict of unequal lengths.
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

    def _only(self, condition: Callable[[], bool], function: Function | None) -> Function:
        if function is None:
            return cast(Function, partial(self._only, condition))

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if condition() else None

        return cast(Function, wrapper)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print, on the main process of each node only."""
        if self.is_local_main_process:
            print(*args, **kwargs)


class AcceleratorState(PartialState):
    """`PartialState` with the requested precision and plug-ins.

    ``mixed_precision``: ``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; default: ``ACCELERATE_MIXED_PRECISION``.
    ``dynamo_plugin``: only stored.
    ``deepspeed_plugin``: train by DeepSpeed, in a world of one and on CPUs too; ``distributed_type`` is then DEEPSPEED.
        A dict of several has the selected one first; see `select_deepspeed_plugin`.
    ``fsdp_plugin``: shard models in worlds of several processes, on CPUs too; ``distributed_type`` is then FSDP.

    Raises `StateError` for a precision or sharding that the first state did not have, and `ArgumentError` for a
    plug-in that is not supported here.
    """

    _shared_state: ClassVar[dict[str, Any]] = PartialState._shared_state

    _mixed_precision: str
    dynamo_plugin: Any = None
    deepspeed_plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    torch_tp_plugin: Any = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    device_mesh: DeviceMesh | None = None
    downcast_bfloat: bool = False

    def __init__(
        self,
        mixed_precision: str | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(cpu, **kwargs)
        with _init_lock:
            if deepspeed_plugin is not None:
                self._use_deepspeed(deepspeed_plugin, fsdp_plugin)
            if fsdp_plugin is not None:
                self._shard(fsdp_plugin)
            if parallelism_config is not None:
                self.parallelism_config = parallelism_config
            if torch_tp_plugin is not None:
                self.torch_tp_plugin = torch_tp_plugin
            if megatron_lm_plugin is not None:
                self._use_megatron(megatron_lm_plugin)
            if "_mixed_precision" not in self.__dict__:
                self._mixed_precision = _requested_precision(mixed_precision)
                if self._mixed_precision == PrecisionType.BF16 and self.backend == xla.BACKEND:
                    self.downcast_bfloat = xla.use_bf16(os.environ)
                self._set_engines_precision()
            elif mixed_precision is not None and str(mixed_precision).lower() != self._mixed_precision:
                raise StateError(
                    f"mixed_precision={str(mixed_precision)!r}: this process already uses "
                    f"{self._mixed_precision!r}: pass it to the first Accelerator or AcceleratorState"
                )
            if dynamo_plugin is not None:
                self.dynamo_plugin = dynamo_plugin

    def _use_deepspeed(self, plugins: DeepSpeedPlugin | dict[str, DeepSpeedPlugin], fsdp_plugin: Any) -> None:
        check_plugins(plugins)
        if self.deepspeed_plugins is plugins:
            return
        if self.deepspeed_plugins is not None:
            raise StateError(
                "deepspeed_plugin: this process already has one: pass all of them, as a dict, to the first Accelerator"
            )
        if "_mixed_precision" in self.__dict__:
            raise StateError(
                "deepspeed_plugin: this process already runs without one: pass it to the first Accelerator or "
                "AcceleratorState"
            )
        if self.backend == xla.BACKEND:
            raise ArgumentError("deepspeed_plugin is not supported under torch_xla: use it on GPUs or CPUs")
        if fsdp_plugin is not None:
            raise ArgumentError("deepspeed_plugin and fsdp_plugin contradict each other: keep one")
        if self.device.type == "cpu" and "deepspeed" not in sys.modules:
            os.environ["DS_ACCELERATOR"] = "cpu"  # also where there is a GPU; transformers may import it first
        self.deepspeed_plugins = plugins
        self.distributed_type = DistributedType.DEEPSPEED

    def _use_megatron(self, plugin: MegatronLMPlugin) -> None:
        if plugin.is_core and self.megatron_lm_plugin is not plugin:
            if "_mixed_precision" in self.__dict__:
                raise StateError(
                    "megatron_lm_plugin: this process already runs without this one: pass it to the first Accelerator"
                )
            self.distributed_type = DistributedType.MEGATRON_LM
        self.megatron_lm_plugin = plugin

    def _set_engines_precision(self) -> None:
        plugins = self.deepspeed_plugins
        if plugins is None:
            return
        for plugin in plugins.values() if isinstance(plugins, dict) else [plugins]:
            plugin.set_mixed_precision(self._mixed_precision)
        first = next(iter(plugins.values())) if isinstance(plugins, dict) else plugins
        first.select(_from_accelerator_state=True)

    def _shard(self, plugin: FullyShardedDataParallelPlugin) -> None:
        if "_mixed_precision" in self.__dict__ and self.fsdp_plugin is None:
            raise StateError(
                "fsdp_plugin: this process already runs without one: pass it to the first Accelerator or "
                "AcceleratorState"
            )
        if self.backend == xla.BACKEND:
            raise ArgumentError("fsdp_plugin is not supported under torch_xla: use it on GPUs or CPUs")
        self.fsdp_plugin = plugin
        if self.use_distributed and not plugin.whole:
            self.distributed_type = DistributedType.FSDP

    def __repr__(self) -> str:
        return f"{super().__repr__()}Mixed precision type: {self._mixed_precision}\n"

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        if reset_partial_state:
            PartialState._shared_state.clear()
        shared = PartialState._shared_state
        for name in _FIELDS:
            shared.pop(name, None)
        plugins = [shared.pop(name, None) for name in ("fsdp_plugin", "deepspeed_plugins", "megatron_lm_plugin")]
        engines = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
        if any(plugin is not None for plugin in plugins) and shared.get("distributed_type") in engines:
            distributed = shared["use_distributed"]
            shared["distributed_type"] = worlds.kind_of(shared["device"]) if distributed else DistributedType.NO

    @property
    def initialized(self) -> bool:
        """True once the precision is known, as after creating an instance."""
        return is_initialized()

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"``, ``"fp16"`` or ``"fp8"``; under DeepSpeed without fp8, as its configuration has it."""
        plugin = self.deepspeed_plugin
        if plugin is None or self._mixed_precision == "fp8":
            return self._mixed_precision
        return plugin.mixed_precision

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded, which is by FSDP 2."""
        return self.distributed_type == DistributedType.FSDP

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The selected DeepSpeed plug-in; None in a run without DeepSpeed."""
        plugins = self.deepspeed_plugins
        if isinstance(plugins, dict):
            return next(plugin for plugin in plugins.values() if plugin.selected)
        return plugins

    def get_deepspeed_plugin(self, name: str) -> DeepSpeedPlugin:
        """Return the plug-in of this name. Raises `StateError` in a run without DeepSpeed."""
        return self._named_plugin("get_deepspeed_plugin", name)

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select the plug-in of this name for the next `Accelerator.prepare`, and for models that are loaded now."""
        selected = self._named_plugin("select_deepspeed_plugin", name)
        for plugin in self.deepspeed_plugins.values():  # type: ignore[union-attr]
            plugin.deselect()
        selected.select(_from_accelerator_state=True)

    def _named_plugin(self, method: str, name: str | None) -> DeepSpeedPlugin:
        plugins = self.deepspeed_plugins
        if plugins is None:
            raise StateError(f"{method}({name!r}) needs a run under DeepSpeed, this is {self.distributed_type}")
        if not isinstance(plugins, dict):
            raise StateError(f"{method}({name!r}): there is one plug-in, without a name: pass deepspeed_plugins={{…}}")
        return plugins[one_of(name, plugins, source=f"{method}(…)")]


# What `AcceleratorState._reset_state` forgets, in addition to plug-ins that set the distributed type.
_FIELDS = (
    "_mixed_precision",
    "dynamo_plugin",
    "downcast_bfloat",
    "parallelism_config",
    "device_mesh",
    "torch_tp_plugin",
)


def _requested_precision(explicit: str | None) -> str:
    source = "mixed_precision" if explicit is not None else "environment variable ACCELERATE_MIXED_PRECISION"
    word = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if explicit is None else str(explicit)
    return one_of(word.lower(), PrecisionType.list(), source=source)
