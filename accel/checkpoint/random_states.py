"""The file of a process's random states, in Accelerate's layout but with types that are safe to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.torch_files import read_object
from accel.collectives.rng import device_rng_state, host_rng_state, set_device_rng_state, set_host_rng_state
from accel.errors import CheckpointError

_DEVICE_KEY = "torch_{}_manual_seed"


def random_states(step: int, device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators, and ``step``."""
    host = host_rng_state()
    version, words, gauss = host["random_state"]
    states: dict[str, Any] = {
        "step": step,
        "random_state": (version, tuple(words), gauss),
        "torch_manual_seed": host["torch_manual_seed"],
    }
    if "numpy_random_seed" in host:
        states["numpy_random_seed"] = tuple(host["numpy_random_seed"])
    if device.type in ("cuda", "xpu"):
        states[_DEVICE_KEY.format(device.type)] = getattr(torch, device.type).get_rng_state_all()
    else:
        states["device_rng"] = device_rng_state(device)
    return states


def set_random_states(path: Path, device: torch.device) -> dict[str, Any]:
    """Restore what `random_states` returned; return the file's content, always with ``step``.

    Reads Accelerate's file too, which holds NumPy arrays. Raises `CheckpointError` for a damaged file.
    """
    states: dict[str, Any] = read_object(path, allowed=numpy_types())
    try:
        host = {"torch_manual_seed": states["torch_manual_seed"], "random_state": states["random_state"]}
        if "numpy_random_seed" in states:
            host["numpy_random_seed"] = states["numpy_random_seed"]
        set_host_rng_state(host)
        set_device_rng_state(device, _of_device(states, device))
        return {**states, "step": int(states.get("step", 0))}
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


def _of_device(states: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    everyones = states.get(_DEVICE_KEY.format(device.type))
    if everyones is None:
        return states.get("device_rng")
    index = device.index or 0
    state: torch.Tensor | None = everyones[index] if index < len(everyones) else None
    return state


def numpy_types() -> list[Any]:
    """Return the types in a pickled NumPy array: numbers and dtypes, nothing that runs code."""
    import codecs

    import numpy

    core = numpy.__dict__.get("_core") or numpy.core
    kinds = [numpy.ndarray, numpy.dtype, core.multiarray._reconstruct, core.multiarray.scalar, codecs.encode]
    return kinds + [type(numpy.dtype(kind)) for kind in ("uint32", "int64", "float64")]
