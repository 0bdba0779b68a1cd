"""The process, its device and its world under torch_xla (2.9), which only this module's functions import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from accel.errors import WorldError
from accel.world.available import is_torch_xla_available
from accel.world.environment import World, read_flag

BACKEND = "xla"
# The init_method with which torch.distributed takes ranks and store from torch_xla.
RENDEZVOUS = "xla://"


def is_requested(env: Mapping[str, str], *, cpu: bool) -> bool:
    """Return True if torch_xla is installed and neither the CPU nor another device is requested."""
    if cpu or read_flag(env, "ACCELERATE_USE_CPU") or env.get("ACCELERATE_TORCH_DEVICE"):
        return False
    return is_torch_xla_available()


def join(env: Mapping[str, str]) -> tuple[World, torch.device]:
    """Return this process's world, as torch_xla started it, and its device. Raises `WorldError`."""
    if int(env.get("WORLD_SIZE") or 1) > 1:
        raise WorldError(
            f"WORLD_SIZE={env['WORLD_SIZE']}, but torch_xla starts its processes itself: use accel launch --tpu, "
            "or set USE_TORCH_XLA=0 to train without torch_xla"
        )
    import torch_xla
    import torch_xla.distributed.xla_backend
    from torch_xla import runtime

    device: torch.device = torch_xla.device()
    cores = runtime.addressable_device_count()
    if cores > 1 and runtime.world_size() > 1:
        raise WorldError(
            f"this process has {cores} XLA devices, one per thread (TPU v2 and v3, CPU_NUM_DEVICES); accel "
            "needs one process per device: use TPU v4 or newer"
        )
    world = World(
        rank=runtime.global_ordinal(),
        size=runtime.world_size(),
        local_rank=runtime.local_ordinal(),
        local_size=runtime.local_device_count(),
    )
    return world, device


def use_bf16(env: Mapping[str, str]) -> bool:
    """Make torch_xla store floats as bfloat16 on the device, from the first tensor on.

    Returns True if doubles then become float32 (``--downcast_bf16``); otherwise they become bfloat16 too.
    """
    downcast = read_flag(env, "ACCELERATE_DOWNCAST_BF16") or read_flag(env, "XLA_DOWNCAST_BF16")
    os.environ["XLA_USE_BF16"], os.environ["XLA_DOWNCAST_BF16"] = str(int(not downcast)), str(int(downcast))
    return downcast


def sync() -> None:
    """Compile and start the operations recorded since the last call."""
    import torch_xla

    torch_xla.sync()


def barrier() -> None:
    """Wait until every process has called this; torch.distributed's barrier does not wait on XLA."""
    _model().rendezvous("accel")


def average(tensors: list[torch.Tensor], processes: int) -> None:
    """Replace tensors, in place, by their mean over all processes."""
    _model().all_reduce("sum", tensors, scale=1.0 / processes)


def broadcast_parameters(model: torch.nn.Module) -> None:
    """Copy the main process's parameters and buffers to every process."""
    _model().broadcast_master_param(model)


def seed(value: int) -> None:
    """Seed the generator of this process's device."""
    _model().set_rng_state(value)


def rng_state() -> torch.Tensor:
    """Return the state of the device's generator, one integer."""
    return torch.tensor([_model().get_rng_state()], dtype=torch.int64)


def set_rng_state(state: torch.Tensor) -> None:
    """Restore what `rng_state` returned."""
    _model().set_rng_state(int(state.item()))


def _model() -> Any:
    import torch_xla.core.xla_model as model

    return model
