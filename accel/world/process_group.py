"""Creation and destruction of the process group."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from accel.enums import DistributedType
from accel.errors import ArgumentError, WorldError, nearest
from accel.world.environment import World, read_flag

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# device type → (backend of its collectives, distributed type of a world of several processes)
BACKENDS: dict[str, tuple[str, DistributedType]] = {
    "cpu": ("gloo", DistributedType.MULTI_CPU),
    "mps": ("gloo", DistributedType.MULTI_CPU),
    "cuda": ("nccl", DistributedType.MULTI_GPU),
    "xpu": ("xccl", DistributedType.MULTI_XPU),
    "npu": ("hccl", DistributedType.MULTI_NPU),
    "mlu": ("cncl", DistributedType.MULTI_MLU),
    "musa": ("mccl", DistributedType.MULTI_MUSA),
    "sdaa": ("tccl", DistributedType.MULTI_SDAA),
    "hpu": ("hccl", DistributedType.MULTI_HPU),
    "neuron": ("neuron", DistributedType.MULTI_NEURON),
    "tpu": ("tpu_dist", DistributedType.XLA),
}
_WITHOUT_OWN_DEVICE = ("cpu", "mps")  # all processes share the device
_ALWAYS_FIRST = ("tpu",)  # torch_tpu shows each process only its own chip

_created_here = False
_timeout: timedelta | None = None  # of all groups; None: torch's
_last_group: Any = None
_holders: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def kind_of(device: torch.device) -> DistributedType:
    """Return the distributed type of a world of several processes on devices of this type."""
    return BACKENDS.get(device.type, BACKENDS["cpu"])[1]


def default_device_type() -> str:
    """Return this machine's best device type: cuda, xpu, mps, one that a package added to torch, or cpu."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.xpu.is_available():
        return "xpu"
    if torch.backends.mps.is_available():
        return "mps"
    added = torch.accelerator.current_accelerator()
    return added.type if added is not None and added.type in BACKENDS and torch.accelerator.is_available() else "cpu"


def choose_device(world: World, env: Mapping[str, str], *, cpu: bool) -> torch.device:
    """Return this process's device.

    It is the CPU with ``cpu`` or ``ACCELERATE_USE_CPU``, else ``ACCELERATE_TORCH_DEVICE``, else the best. Raises
    `WorldError` if this process has no device of its own, and `ArgumentError` for an unknown device.
    """
    if cpu or read_flag(env, "ACCELERATE_USE_CPU"):
        return torch.device("cpu")
    device_name = env.get("ACCELERATE_TORCH_DEVICE", "")
    if device_name:
        return _device_from_env(device_name)
    kind = default_device_type()
    if kind == "mps" and world.size > 1:
        return torch.device("cpu")  # one MPS device cannot be shared by the ranks of a world
    if kind in _WITHOUT_OWN_DEVICE:
        return torch.device(kind)
    if kind in _ALWAYS_FIRST:
        return torch.device(kind, 0)
    return _own_device(kind, world)


def _device_from_env(device_name: str) -> torch.device:
    try:
        return torch.device(device_name)
    except RuntimeError:
        kind = device_name.split(":")[0]
        raise ArgumentError(
            f"environment variable ACCELERATE_TORCH_DEVICE={device_name!r} is no torch device{nearest(kind, BACKENDS)}"
        ) from None


def _own_device(kind: str, world: World) -> torch.device:
    count: int = getattr(torch, kind).device_count()
    index = max(world.local_rank, 0)
    if index >= count:
        raise WorldError(
            f"LOCAL_RANK={index} has no device of its own: this node shows {count} {kind} device(s); "
            "start fewer processes, or set ACCELERATE_USE_CPU=1"
        )
    return torch.device(kind, index)


def use_device(device: torch.device) -> None:
    """Make ``device`` the current one of its type, for types that have a current one."""
    if device.type not in (*_WITHOUT_OWN_DEVICE, *_ALWAYS_FIRST) and hasattr(torch, device.type):
        getattr(torch, device.type).set_device(device)


def form(world: World, device: torch.device, options: Mapping[str, Any]) -> str:
    """Create the process group, or join the one that the script created; return its backend's name.

    A process group created here is destroyed when the interpreter exits. Raises `WorldError` if it cannot be
    created.
    """
    global _created_here, _timeout
    _timeout = options.get("timeout")
    if dist.is_initialized():
        return str(dist.get_backend())
    backend = options.get("backend") or BACKENDS.get(device.type, BACKENDS["cpu"])[0]
    if not dist.is_available():
        raise WorldError(f"WORLD_SIZE={world.size} but this build of torch has no torch.distributed")
    # Its functions bind the world group as a default: imported later, as by DDP, they would keep the group alive.
    import_module("torch.distributed.nn.functional")
    _init(world, backend, options.get("init_method"))
    _created_here = True
    atexit.register(_destroy_at_exit)
    return str(dist.get_backend())


def form_alone(device: torch.device) -> None:
    """Create a process group of this process alone, for a library that needs one, unless there is a group already."""
    global _created_here
    if not dist.is_initialized():
        backend = BACKENDS.get(device.type, BACKENDS["cpu"])[0]
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        _created_here = True
        atexit.register(_destroy_at_exit)


@contextmanager
def _init_barrier() -> Iterator[None]:
    """Make `init_process_group` return only once every rank has joined.

    A rank that exits at once would otherwise break the connection to one that is still joining.
    """
    name = "TORCH_DIST_INIT_BARRIER"
    previous = os.environ.get(name)
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]


def _init(world: World, backend: str, init_method: str | None) -> None:
    try:
        with _init_barrier():
            dist.init_process_group(
                backend, init_method=init_method or "env://", timeout=_timeout, rank=world.rank, world_size=world.size
            )
    except (RuntimeError, ValueError, dist.DistError) as error:
        address = init_method or f"{world.master_addr}:{world.master_port}"
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WorldError(
            f"rank {world.rank} of {world.size} could not join the world at {address} over {backend}: {first}"
        ) from error


def new_group(ranks: list[int] | None = None, backend: str | None = None) -> Any:
    """Create a process group with the timeout of `form`; return None in a world without process groups.

    All of ``ranks``, by default of the world, must call it.
    """
    if not dist.is_initialized():
        return None
    return dist.new_group(ranks, _timeout, backend, use_local_synchronization=ranks is not None)


def new_device_mesh(sizes: Mapping[str, int], flattened: Mapping[str, tuple[str, ...]], device_type: str) -> DeviceMesh:
    """Create a device mesh over the world; all processes must call it.

    ``sizes``: of each dimension, outermost first. ``flattened``: combined dimensions → their parts.
    """
    from torch.distributed.device_mesh import DeviceMesh

    world = torch.arange(dist.get_world_size()).view(tuple(sizes.values()))
    coordinates = (world == dist.get_rank()).nonzero()[0].tolist()
    # Only its members create a group: by default all processes of the world would wait for each group.
    by_ranks: dict[tuple[int, ...], dist.ProcessGroup] = {tuple(range(world.numel())): dist.group.WORLD}  # type: ignore[dict-item]
    groups = []
    for axis in range(world.ndim):
        selection = tuple(slice(None) if axis == dim else index for dim, index in enumerate(coordinates))
        ranks = tuple(world[selection].tolist())
        if ranks not in by_ranks:
            by_ranks[ranks] = new_group(list(ranks))
        groups.append(by_ranks[ranks])
    mesh = DeviceMesh.from_group(groups, device_type, world, mesh_dim_names=tuple(sizes))
    with set_timeout_of_new_groups():
        for name, parts in flattened.items():
            mesh[parts]._flatten(name)
    return mesh


@contextmanager
def set_timeout_of_new_groups() -> Iterator[None]:
    """Give the groups that torch creates in the block the timeout of `form`."""
    earlier = set(dist.distributed_c10d._world.pg_map)
    yield
    for group in dist.distributed_c10d._world.pg_map.keys() - earlier:
        if _timeout is not None:
            dist.distributed_c10d._set_pg_timeout(_timeout, group)


def hold_open(model: torch.nn.Module) -> None:
    """Register a model, such as DDP's, whose C++ part keeps the process group alive; see `_drop_reference`."""
    _holders.add(model)


def destroy() -> None:
    """Destroy the process group, if there is one. Idempotent."""
    global _created_here, _last_group, _timeout
    if dist.is_available() and dist.is_initialized():
        if _created_here:
            _last_group = dist.group.WORLD
        dist.destroy_process_group()
    _created_here, _timeout = False, None


def _destroy_at_exit() -> None:
    # After an uncaught exception the other ranks may be in a collective that this one never joins: an orderly shutdown
    # could wait for them, while a plain exit lets the launcher see the failure at once.
    if getattr(sys, "last_value", None) is not None:
        return
    destroy_process_group()


def destroy_process_group() -> None:
    """Destroy the process group created here and release it, in an order that cannot hang. Call it before exit."""
    if _created_here:
        destroy()
    _drop_reference()


def _drop_reference() -> None:
    """Drop the last reference to the process group, from Python.

    A gloo group that is dropped waits for its threads, which may wait for the interpreter's lock to drop what the
    last collective used. Python releases the lock meanwhile; DDP's reducer does not, and the process would hang
    forever (torch 2.6 to 2.13). So reducers are dropped first, while `_last_group` still refers to the group.
    """
    global _last_group
    for model in list(_holders):
        for name in ("reducer", "logger", "process_group"):
            vars(model).pop(name, None)
    _last_group = None


def world_from_torch() -> World | None:
    """Return the world of the process group that the script created itself, or ``None``."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return World(rank=rank, size=size, local_rank=local_rank, local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)))


def barrier(device: torch.device) -> None:
    """Wait until every process of the world has called this."""
    if device.type == "cuda":
        dist.barrier(device_ids=[device.index or 0])
    else:
        dist.barrier()
