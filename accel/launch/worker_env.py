"""Environment variables of the workers: training settings, and thread counts that do not overload a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accel.settings.env_variables import variables

from .devices import VISIBLE, Devices

# Ways whose launcher in Accelerate leaves the choice of the device to the runtime.
_OWN_DEVICE = ("use_deepspeed", "use_fsdp", "use_megatron_lm", "tpu")


def training(options: Mapping[str, Any], devices: Devices) -> dict[str, str]:
    """Return the `ACCELERATE_*` variables that `Accelerator()` reads, accel's and Hugging Face's alike.

    `options` are the values of the settings, by name. A setting that is not given leaves its variable as it is.
    """
    env = variables(options)
    if options["cpu"] or (devices.kind == "cpu" and not any(options[name] for name in _OWN_DEVICE)):
        # Hugging Face's runtime forms no world on a machine without a GPU unless it is told that CPUs are meant.
        env["ACCELERATE_USE_CPU"] = "true"
    if options["gpu_ids"] not in (None, "", "all") and devices.kind in VISIBLE:
        env[VISIBLE[devices.kind]] = str(options["gpu_ids"])
    return env


def threads(asked: int | None, processes: int, devices: Devices, env: Mapping[str, str]) -> dict[str, str]:
    """Return `OMP_NUM_THREADS`: an equal share of this node's processors per rank, unless it is set already."""
    if asked is not None:
        return {"OMP_NUM_THREADS": str(asked)}
    if "OMP_NUM_THREADS" in env or processes == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, devices.cpus // processes))}
