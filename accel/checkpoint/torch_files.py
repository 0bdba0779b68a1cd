"""Files of objects and of random states: `torch.save` writes them, `accel.tensor_files.read_object` reads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.serialization import config

from accel.checkpoint.durable import Digest, write_durably
from accel.collectives.rng import device_rng_state, host_rng_state, set_device_rng_state, set_host_rng_state
from accel.errors import CheckpointError
from accel.tensor_files import read_object


def write_bytes(path: Path, data: bytes) -> Digest:
    """Write ``data`` to a new file and flush it to the disk."""
    return write_durably(path, lambda file: file.write(data))


def write_object(path: Path, value: Any) -> Digest:
    """Write ``value``, of any type, with `torch.save`."""
    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with config.patch("save.use_pinned_memory_for_d2h", pinned):  # type: ignore[attr-defined]
        return write_durably(path, lambda file: torch.save(value, file))  # type: ignore[arg-type]


def write_safe_object(path: Path, value: Any) -> Digest:
    """Write ``value`` so that `read_object` can read it.

    Raises `CheckpointError` for a type that `read_object` would refuse.
    """
    # The manifest has the file's checksums, so torch need not compute those of the zip format too.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        digest = write_object(path, value)
    unsafe_globals = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe_globals:
        raise CheckpointError(
            f"{path.name} would hold {', '.join(sorted(set(unsafe_globals)))}, which cannot be loaded safely: "
            "keep tensors, numbers, strings, lists, tuples and dicts in a state_dict"
        )
    return digest


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft path next to ``path``, and rename it to ``path`` when the block ends.

    If the block fails the draft is deleted.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


# The states of a process's random number generators, in Accelerate's form, in types that are safe to read.

_DEVICE_KEY = "torch_{}_manual_seed"


def random_states(step: int, device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators, and ``step``."""
    states = {"step": step, **host_rng_state()}
    if device.type in ("cuda", "xpu"):
        states[_DEVICE_KEY.format(device.type)] = getattr(torch, device.type).get_rng_state_all()
    else:
        states["device_rng"] = device_rng_state(device)
    return states


def read_random_states(path: Path) -> dict[str, Any]:
    """Return the content of a file of `random_states`, always with ``step``. Raises `CheckpointError` if it is damaged.

    Reads Accelerate's file too, which holds NumPy arrays.
    """
    states: dict[str, Any] = read_object(path, allowed=numpy_types())
    try:
        missing = {"torch_manual_seed", "random_state"} - states.keys()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
        return {**states, "step": int(states.get("step", 0))}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Restore ``states``. Raises `CheckpointError` for values that no generator has."""
    try:
        set_host_rng_state(states)
        set_device_rng_state(device, _of_device(states, device))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"random states cannot be loaded: {type(error).__name__}: {error}") from error


def _of_device(states: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    device_states = states.get(_DEVICE_KEY.format(device.type))
    if device_states is None:
        return states.get("device_rng")
    index = device.index or 0
    state: torch.Tensor | None = device_states[index] if index < len(device_states) else None
    return state


def numpy_types() -> list[Any]:
    """Return the types in a pickled NumPy array: numbers and dtypes, nothing that runs code."""
    import codecs

    import numpy

    core = numpy.__dict__.get("_core") or numpy.core
    kinds = [numpy.ndarray, numpy.dtype, core.multiarray._reconstruct, core.multiarray.scalar, codecs.encode]
    return kinds + [type(numpy.dtype(kind)) for kind in ("uint32", "int64", "float64")]
