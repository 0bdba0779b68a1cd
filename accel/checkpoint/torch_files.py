"""Files of objects and of random states: `torch.save` writes them, `weights_only=True` reads them back.

So no file of a checkpoint can run code. See `accel.checkpoint.tensors` for files of tensors.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.durable import Digest, write_durably
from accel.checkpoint.tensors import in_memory
from accel.collectives.rng import device_rng_state, host_rng_state, set_device_rng_state, set_host_rng_state
from accel.errors import CheckpointError


def write_bytes(path: Path, data: bytes) -> Digest:
    """Write ``data`` to a new file and flush it to the disk."""
    return write_durably(path, lambda file: file.write(data))


def write_object(path: Path, value: Any) -> Digest:
    """Write ``value``, of any type, with `torch.save`."""
    from torch.utils.serialization import config

    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with config.patch("save.use_pinned_memory_for_d2h", pinned):  # type: ignore[attr-defined]
        return write_durably(path, lambda file: torch.save(value, file))  # type: ignore[arg-type]


def write_safe_object(path: Path, value: Any) -> Digest:
    """Write ``value`` so that `read_object` can read it.

    Raises `CheckpointError` for a type that `read_object` would refuse.
    """
    digest = write_object(path, value)
    unsafe_globals = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe_globals:
        raise CheckpointError(
            f"{path.name} would hold {', '.join(sorted(set(unsafe_globals)))}, which cannot be loaded safely: "
            "keep tensors, numbers, strings, lists, tuples and dicts in a state_dict"
        )
    return digest


def read_object(path: Path, *, mapped: bool = False, allowed: Iterable[Any] = (), **options: Any) -> Any:
    """Read a file by `torch.save`, its tensors on the CPU.

    ``mapped``: memory-map the tensors, if the file's format allows it; see `accel.checkpoint.tensors.evict`.
    ``allowed``: types that may be in the file besides torch's defaults.
    ``options``: further options of `torch.load`.

    Raises `CheckpointError` for a file that is missing, damaged, or holds other types.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped or None, **options)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        if mapped and not _is_archive(path):
            return in_memory(read_object(path, allowed=allowed, **options))
        raise CheckpointError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


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
    host = host_rng_state()
    version, internal_state, gauss = host["random_state"]
    states: dict[str, Any] = {
        "step": step,
        "random_state": (version, tuple(internal_state), gauss),
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
    """Restore the states in the file ``path``; return its content, always with ``step``.

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
