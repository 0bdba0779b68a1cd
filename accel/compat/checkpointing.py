"""`accelerate.checkpointing`: write a checkpoint's files into a folder, and read them, without an `Accelerator`.

`Accelerator.save_state` does more: its checkpoints are atomic and verified when read. Here only each single
file is replaced atomically.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accel.checkpoint import load, save
from accel.checkpoint.contents import CheckpointContents, Loading, Piece
from accel.checkpoint.file_names import MANIFEST, SCALER_NAME, custom_name
from accel.checkpoint.files import fits_safetensors
from accel.checkpoint.manifest import find_damage
from accel.errors import CheckpointError, one_of
from accel.parallel import choose_strategy
from accel.precision import Precision
from accel.state import AcceleratorState, PartialState, is_initialized


def save_accelerator_state(
    output_dir: str,
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the files of a checkpoint into the existing folder ``output_dir`` and return it.

    The main process (with ``save_on_each_node`` that of every node) writes the common files; every process writes
    its random number generators and ``step``. Weights that safetensors cannot hold make it write pickles. Raises
    `CheckpointError` where `Accelerator.save_state` has saved: readers would follow the manifest there.
    """
    folder, state = Path(output_dir), PartialState()
    if (folder / MANIFEST).exists():
        raise CheckpointError(f"save_accelerator_state: {folder} has a checkpoint of save_state: use another directory")
    safe = safe_serialization and all(fits_safetensors(value) for weights in model_states for value in weights.values())
    contents = _contents((), optimizers, schedulers, dataloaders, process_index, safe=safe)
    states = [contents.strategy.optimizer_state(optimizer) for optimizer in optimizers]
    if state.is_local_main_process if save_on_each_node else state.is_main_process:
        for piece in contents.shared(dict(enumerate(model_states)), dict(enumerate(states))):
            _write(piece, folder)
    if scaler is not None:
        save(scaler.state_dict(), folder / SCALER_NAME, save_on_each_node)
    for piece in contents.rank_state(step, window_open=False):
        _write(piece, folder)
    return folder


def load_accelerator_state(
    input_dir: str,
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: str | None = None,
    load_kwargs: dict[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Load a checkpoint of `save_accelerator_state` or Accelerate; return ``{"step": …}`` if it has one.

    One of `Accelerator.save_state` is verified, and read as its manifest says.

    Every tensor is loaded onto the device of its object, regardless of ``map_location`` (``"cpu"`` or
    ``"on_device"``). Raises `CheckpointError` naming the file that is missing, damaged or does not fit.
    """
    if map_location is not None:
        one_of(map_location, ["cpu", "on_device"], source="load_accelerator_state(map_location=…)")
    folder = Path(input_dir)
    contents = _contents(models, optimizers, schedulers, dataloaders, process_index, options=load_kwargs)
    problem = find_damage(folder) if (folder / MANIFEST).exists() else None
    if problem is not None:
        raise CheckpointError(problem)
    loading = Loading(contents, folder, **load_model_func_kwargs)
    loading.check()
    loading.load(lambda load: load())
    step = loading.load_random_states()
    if scaler is not None:
        scaler.load_state_dict(load(folder / SCALER_NAME))
    return {} if step is None else {"step": step}


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write ``obj.state_dict()`` into the folder ``path``, as custom object number ``index``."""
    save(obj.state_dict(), Path(path) / custom_name(index), save_on_each_node)


def load_custom_state(obj: Any, path: str, index: int = 0) -> None:
    """Load a file of `save_custom_state` into ``obj``. Raises `CheckpointError` if it is missing."""
    file = Path(path) / custom_name(index)
    if not file.exists():
        raise CheckpointError(f"{path} has no {file.name}")
    obj.load_state_dict(load(file, map_location="cpu"))


def _contents(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    **options: Any,
) -> CheckpointContents:
    state: PartialState = PartialState()
    plugins: dict[type, Any] = {}
    if is_initialized():
        state = AcceleratorState()
        plugins = {type(plugin): plugin for plugin in (state.fsdp_plugin, state.parallelism_config) if plugin}
    return CheckpointContents(
        device=state.device,
        process_index=process_index,
        strategy=choose_strategy(state, plugins),
        precision=Precision(state.device),
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        loaders=dataloaders,
        **options,
    )


def _write(piece: Piece, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as draft:
        piece.write(Path(draft))
        os.replace(Path(draft) / piece.name, folder / piece.name)
