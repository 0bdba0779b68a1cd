"""The process, its device and its world under torch_xla (2.9), which is imported here and nowhere above."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from accel.errors import WorldError
from accel.world.available import is_torch_xla_available
from accel.world.environment import World, read_flag

BACKEND = "xla"
# How torch.distributed is told to ask torch_xla for ranks and a store.
RENDEZVOUS = "xla://"


def is_asked(env: Mapping[str, str], *, cpu: bool) -> bool:
    """Return True where torch_xla is installed and neither the CPU nor another device is asked for."""
    if cpu or read_flag(env, "ACCELERATE_USE_CPU") or env.get("ACCELERATE_TORCH_DEVICE"):
        return False
    return is_torch_xla_available()


def join(env: Mapping[str, str]) -> tuple[World, torch.device]:
    """This process's place among those that torch_xla has started, and its device. Raises `WorldError`."""
    if int(env.get("WORLD_SIZE") or 1) > 1:
        raise WorldError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, and torch_xla starts its processes itself: use accel launch --tpu, "
            "or set USE_TORCH_XLA=0 to leave torch_xla aside"
        )
    import torch_xla
    import torch_xla.distributed.xla_backend
    from torch_xla import runtime

    device: torch.device = torch_xla.device()
    cores = runtime.addressable_device_count()
    if cores > 1 and runtime.world_size() > 1:
        raise WorldError(
            f"this process has {cores} XLA devices, and a thread runs on each (TPU v2 and v3, CPU_NUM_DEVICES); accel "
            "needs a process for each: use TPU v4 or newer"
        )
    world = World(
        rank=runtime.global_ordinal(),
        size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_size=runtime.local_device_count(),
    )
    return world, device


def use_bf16(env: Mapping[str, str]) -> bool:
    """Have torch_xla keep floats in bfloat16 on the device, from the first tensor on, and in which way.

    Returns True if doubles become float32 beside that (``--downcast_bf16``); without it, they become bfloat16 too.
    """
    downcast = read_flag(env, "ACCELERATE_DOWNCAST_BF16") or read_flag(env, "XLA_DOWNCAST_BF16")
    os.environ["XLA_USE_BF16"], os.environ["XLA_DOWNCAST_BF16"] = str(int(not downcast)), str(int(downcast))
    return downcast


def sync() -> None:
    """Compile and start what was recorded since the last time."""
    import torch_xla

    torch_xla.sync()


def barrier() -> None:
    """Wait until every process has come here, which torch.distributed's barrier does not on XLA."""
    _model().rendezvous("accel")


def average(tensors: list[torch.Tensor], processes: int) -> None:
    """Replace tensors, in place, by their mean over all processes."""
    _model().all_reduce("sum", tensors, scale=1.0 / processes)


def broadcast_parameters(model: torch.nn.Module) -> None:
    """Give every process the main process's parameters and buffers."""
    _model().broadcast_master_param(model)


def seed(value: int) -> None:
    """Seed the generator of this process's device."""
    _model().set_rng_state(value)


def rng_state() -> torch.Tensor:
    """The state of the device's generator, a number."""
    return torch.tensor([_model().get_rng_state()], dtype=torch.int64)


def set_rng_state(state: torch.Tensor) -> None:
    """Give back what `rng_state` took."""
    _model().set_rng_state(int(state.item()))


def _model() -> Any:
    import torch_xla.core.xla_model as model

    return model
