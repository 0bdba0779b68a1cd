"""Single objects in files, outside checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.full_disk import reporting_full_disk
from accel.checkpoint.random_states import numpy_types
from accel.checkpoint.tensors import write_tensors
from accel.checkpoint.torch_files import replacing, write_object
from accel.checkpoint.weights import clean_state_dict_for_safetensors
from accel.errors import ArgumentError, CheckpointError
from accel.state import PartialState


def keeps(state: PartialState, save_on_each_node: bool) -> bool:
    """Return True if this process writes shared data: one process in the world, or one per node."""
    return state.is_local_main_process if save_on_each_node else state.is_main_process


def save(obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False) -> None:
    """Write ``obj`` to the file ``f`` on the main process, or with ``save_on_each_node`` on one per node.

    An existing file is replaced atomically. With ``safe_serialization`` ``obj`` must be a dict of tensors and is
    written as a safetensors file; of names that share memory only the first is kept, with a warning. Otherwise
    `torch.save` writes it, and ``f`` may be an open file.
    """
    if not keeps(PartialState(), save_on_each_node):
        return
    if hasattr(f, "write"):
        if safe_serialization:
            raise ArgumentError("save(safe_serialization=True) needs the name of a file, not an open one")
        torch.save(obj, f)
        return
    place = Path(f)
    try:
        with reporting_full_disk(place.parent), replacing(place) as draft:
            if safe_serialization:
                write_tensors(draft, clean_state_dict_for_safetensors(_tensors(obj)))
            else:
                write_object(draft, obj)
    except CheckpointError as error:
        raise CheckpointError(f"saving {place}: {error}") from error


def _tensors(obj: Any) -> dict[str, torch.Tensor]:
    if not isinstance(obj, dict) or not all(isinstance(value, torch.Tensor) for value in obj.values()):
        raise ArgumentError("save(safe_serialization=True) takes a dict of tensors")
    return obj


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Call `torch.load` with ``weights_only=True`` by default, and with NumPy arrays allowed in the file."""
    kwargs.setdefault("weights_only", True)
    with torch.serialization.safe_globals(numpy_types()):
        return torch.load(f, map_location=map_location, **kwargs)
