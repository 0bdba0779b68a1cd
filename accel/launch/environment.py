"""The variables that workers are given: how a script is to train, and what keeps a node from being overrun."""

from __future__ import annotations

from collections.abc import Mapping

from .devices import VISIBLE, Devices


def training(options: Mapping[str, object], devices: Devices) -> dict[str, str]:
    """`ACCELERATE_*`: what `Accelerator()` reads, ours and Hugging Face's alike.

    `options` are the values of `accel launch`'s flags, by name. A flag that is not given leaves the variable as it is.
    """
    env = {}
    for name in ("mixed_precision", "gradient_accumulation_steps"):
        if options[name] is not None:
            env[f"ACCELERATE_{name.upper()}"] = str(options[name])
    if options["cpu"] or devices.kind == "cpu":
        # Hugging Face's runtime forms no world on a machine without a GPU unless it is told that CPUs are meant.
        env["ACCELERATE_USE_CPU"] = "true"
    if options["debug"]:
        env["ACCELERATE_DEBUG_MODE"] = "true"
    if options["gpu_ids"] not in (None, "", "all") and devices.kind in VISIBLE:
        env[VISIBLE[devices.kind]] = str(options["gpu_ids"])
    return env | _dynamo(options)


def _dynamo(options: Mapping[str, object]) -> dict[str, str]:
    if options["dynamo_backend"] is None:
        return {}
    env = {"ACCELERATE_DYNAMO_BACKEND": str(options["dynamo_backend"]).upper()}
    if options["dynamo_backend"] != "no":
        env["ACCELERATE_DYNAMO_MODE"] = str(options["dynamo_mode"])
        env["ACCELERATE_DYNAMO_USE_FULLGRAPH"] = str(options["dynamo_use_fullgraph"])
        env["ACCELERATE_DYNAMO_USE_DYNAMIC"] = str(options["dynamo_use_dynamic"])
        env["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(options["dynamo_use_regional_compilation"])
    return env


def threads(asked: int | None, processes: int, devices: Devices, env: Mapping[str, str]) -> dict[str, str]:
    """`OMP_NUM_THREADS`: an equal share of this node's processors for each rank, unless it is set already."""
    if asked is not None:
        return {"OMP_NUM_THREADS": str(asked)}
    if "OMP_NUM_THREADS" in env or processes == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, devices.cpus // processes))}
