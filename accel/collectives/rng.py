"""Random number generators: seeding, saving, restoring and synchronizing their states."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from accel import collectives
from accel.enums import RNGType
from accel.errors import one_of
from accel.state import AcceleratorState, PartialState, is_initialized
from accel.world import xla


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, including those of every device.

    ``device_specific`` adds the index of the process, or of its data share where several have the same data.
    ``deterministic`` makes torch refuse algorithms whose
    result may differ from run to run.
    """
    if device_specific:
        config = AcceleratorState().parallelism_config if is_initialized() else None
        seed += PartialState().process_index // (config.non_data_parallel_size if config else 1)
    _seed_python(seed)
    torch.manual_seed(seed)
    if _on_xla():
        xla.seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _seed_python(seed: int) -> None:
    random.seed(seed)
    with suppress(ImportError):  # imported here, for scripts that import numpy later
        import numpy

        numpy.random.seed(seed % 2**32)


@contextmanager
def fork_host_rng(seed: int | None = None) -> Iterator[None]:
    """Restore torch's CPU, Python's and NumPy's generators after the block, which begins with ``seed``, if any."""
    state = host_rng_state()
    if seed is not None:
        _seed_python(seed)
        torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        set_host_rng_state(state)


def host_rng_state() -> dict[str, Any]:
    """Return the states of torch's CPU, Python's and NumPy's generators, in types that a safe unpickler reads."""
    state: dict[str, Any] = {"torch_manual_seed": torch.get_rng_state(), "random_state": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy_random_seed"] = str(name), keys.tolist(), int(position), int(has_gauss), float(cached)
    return state


def set_host_rng_state(state: dict[str, Any]) -> None:
    """Restore what `host_rng_state` returned; generators that it did not include keep their state."""
    torch.set_rng_state(state["torch_manual_seed"])
    version, internal_state, gauss = state["random_state"]
    random.setstate((version, tuple(internal_state), gauss))
    if "numpy_random_seed" in state:
        import numpy

        name, keys, position, has_gauss, cached = state["numpy_random_seed"]
        numpy.random.set_state((name, numpy.asarray(keys, dtype=numpy.uint32), position, has_gauss, cached))


def device_rng_state(device: torch.device) -> torch.Tensor | None:
    """Return the state of ``device``'s generator; ``None`` for the CPU, whose state `host_rng_state` returns."""
    if _on_xla():
        return xla.rng_state()
    if device.type == "cpu":
        return None
    state: torch.Tensor = getattr(torch, device.type).get_rng_state(*_generator_arguments(device))
    return state


def set_device_rng_state(device: torch.device, state: torch.Tensor | None) -> None:
    """Restore what `device_rng_state` returned."""
    if state is None:
        return
    if _on_xla():
        xla.set_rng_state(state)
    elif device.type != "cpu":
        getattr(torch, device.type).set_rng_state(state, *_generator_arguments(device))


def _generator_arguments(device: torch.device) -> list[torch.device]:
    return [] if device.type == "mps" else [device]


def synchronize_rng_state(rng_type: RNGType | str | None = None, generator: torch.Generator | None = None) -> None:
    """Set one generator of every process to the main process's state. One collective; nothing in a world of one.

    ``"torch"`` is the CPU's generator, ``"generator"`` the argument, if any. Any other name is a device type: the
    generator of this process's device, if the device is of that type, else none.
    """
    kind = RNGType(one_of(str(rng_type), RNGType.list(), source="rng_type"))
    state = PartialState()
    if not state.use_distributed:
        return
    if kind is RNGType.GENERATOR:
        if generator is not None:
            generator.set_state(_broadcast_state(generator.get_state()))
    elif kind is RNGType.TORCH:
        torch.set_rng_state(_broadcast_state(torch.get_rng_state()))
    elif kind.value == state.device.type:
        device_state = device_rng_state(state.device)
        if device_state is not None:
            set_device_rng_state(state.device, _broadcast_state(device_state))


def _on_xla() -> bool:
    return PartialState._shared_state.get("backend") == xla.BACKEND


def _broadcast_state(state: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = collectives.broadcast(state.clone())
    return result


def synchronize_rng_states(rng_types: Sequence[RNGType | str], generator: torch.Generator | None = None) -> None:
    """Call `synchronize_rng_state` for each of ``rng_types``, in order."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)
