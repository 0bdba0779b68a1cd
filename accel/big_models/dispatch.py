"""Dispatching a model over devices, including the host and the disk, so that it runs unchanged."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.big_models.align import AlignDevicesHook, attach_align_device_hook, attach_align_device_hook_on_blocks
from accel.big_models.checkpoint_shards import first_few
from accel.big_models.device_map import check_device_map, infer_auto_device_map
from accel.big_models.devices import META, Device, accelerator_type, is_offload
from accel.big_models.hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from accel.big_models.load import load_checkpoint_in_model
from accel.big_models.max_memory import MaxMemory, get_balanced_memory
from accel.big_models.module_tensors import (
    TiedParams,
    find_tied_parameters,
    retie_parameters,
    tensor_named,
)
from accel.big_models.offload import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
    read_offload_index,
)
from accel.big_models.sizes import Dtype, direct_parts
from accel.errors import ArgumentError, CheckpointError, StateError, one_of

logger = logging.getLogger(__name__)

_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def cpu_offload(
    model: nn.Module,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Keep the weights of ``model`` on the host, and move each module's to ``execution_device`` for its forward.

    The default device is that of the first parameter; for an empty model it is this machine's accelerator, or the
    host. ``state_dict`` holds the weights, if they are elsewhere already. ``preload_module_classes``: see
    `attach_align_device_hook`. Returns the model, changed in place.
    """
    if state_dict is None:
        state_dict = {name: value.to("cpu") for name, value in model.state_dict().items()}
    device = execution_device if execution_device is not None else _first_device(model)
    return _offload(model, device, offload_buffers, state_dict, preload_module_classes)


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> nn.Module:
    """Do as `cpu_offload`, with the weights in files in ``offload_dir``.

    Weights are written there, except those on the meta device, which must be there already.
    """
    resident = set() if offload_buffers else {name for name, _ in model.named_buffers()}
    device = execution_device if execution_device is not None else _first_device(model)
    _write_offloaded(model.state_dict(), resident, Path(offload_dir))
    weights = OffloadedWeightsLoader(save_folder=offload_dir, device=device)
    return _offload(model, device, offload_buffers, weights, preload_module_classes)


def _first_device(model: nn.Module) -> Device:
    first = next(model.parameters(), None)
    if first is None:
        raise ArgumentError(f"{type(model).__name__} has no parameters: nothing to offload")
    return first.device if first.device != META else accelerator_type() or "cpu"


def _offload(
    model: nn.Module,
    device: Device,
    offload_buffers: bool,
    weights: Mapping[str, torch.Tensor],
    preload: Collection[str] | None,
) -> nn.Module:
    tied = _copies_of_tied(model, find_tied_parameters(model))
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        offload_buffers=offload_buffers,
        weights_map=weights,
        preload_module_classes=preload,
        tied_params_map=tied,
    )
    return model


def _write_offloaded(state: Mapping[str, torch.Tensor], resident: Collection[str], folder: Path) -> None:
    """Write the weights that have values. Raises `CheckpointError` if one without is not there already."""
    offloaded = {name: value for name, value in state.items() if name not in resident}
    offload_state_dict(folder, {name: value for name, value in offloaded.items() if value.device != META})
    empty = [name for name, value in offloaded.items() if value.device == META]
    if empty:
        index = read_offload_index(folder)
        missing = [name for name in empty if name not in index]
        if missing:
            raise CheckpointError(
                f"{folder / INDEX_NAME} lacks {first_few(missing)}, and the model has no values: load the weights first"
            )


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: Device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep ``model`` on the host until its forward, then on ``execution_device`` until the hook's ``offload()``.

    Returns the model and the hook. ``prev_module_hook``: the hook of the preceding model in a pipeline, which is
    moved back to the host first.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def dispatch_model(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main_device: Device | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> nn.Module:
    """Move the parts of ``model`` to their devices, and attach hooks that move inputs and offloaded weights.

    Returns the model, changed in place, with the map as ``hf_device_map``.

    - ``main_device``: computes the parts on the host or the disk; default: the first accelerator of the map, or
      the host, whose weights then stay there.
    - ``state_dict``: the weights of the part on the host; by default the model's.
    - ``offload_dir``: the folder of the weights on ``"disk"``; they are written there if the model holds them.
    - ``offload_index``: describes these weights; default: the index in that folder.
    - ``force_hooks``: attach hooks even for a map with one device other than the disk; otherwise the model is
      only moved.
    - ``skip_keys``, ``offload_buffers``: see `AlignDevicesHook`.
    - ``preload_module_classes``: see `attach_align_device_hook`.

    An entry inside another's module overrides it. Raises `ArgumentError` for a map that omits a tensor, and
    `CheckpointError` if weights on disk are missing.
    """
    check_device_map(model, device_map)
    flat = _flatten(model, device_map)
    devices = list(dict.fromkeys(flat.values()))
    dispatched: Any = model
    if len(devices) == 1 and "disk" not in devices and not force_hooks:
        model.to(devices[0])
        dispatched.hf_device_map = dict(device_map)
        return model
    main = _plain(main_device) if main_device is not None else _main_device(devices)
    offload_devices = ("disk",) if main in ("cpu", "mps") else ("cpu", "disk")
    offload = {name: device in offload_devices for name, device in flat.items()}
    resident = set() if offload_buffers else {name for name, _ in model.named_buffers()}
    weights = _weights(model, flat, main, resident, state_dict, offload_dir, offload_index)
    ties = find_tied_parameters(model)
    tied = _copies_of_tied(model, ties)
    compute_devices = {name: main if device in ("cpu", "disk") else device for name, device in flat.items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={**compute_devices, "": main},
        offload=offload,
        offload_buffers=offload_buffers,
        weights_map=weights,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=tied,
    )
    retie_parameters(model, ties)
    _guard_moves(model)
    dispatched.hf_device_map = dict(device_map)
    return model


def _main_device(devices: list[Device]) -> Device:
    numbers = sorted(device for device in devices if isinstance(device, int))
    others = [device for device in devices if not is_offload(device)]
    return (numbers or others or ["cpu"])[0]


def _flatten(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Return the map without nested entries: an entry that contains others is replaced by its remaining parts."""
    known = {"", *model.state_dict(), *(name for name, _ in [*model.named_modules(), *model.named_buffers()])}
    keys = [key for key in device_map if key in known]
    flat: dict[str, Device] = {}
    for name in keys:
        nested = {key for key in keys if key != name and (not name or key.startswith(f"{name}."))}
        for part in _remaining_parts(name, model, nested) if nested else [name]:
            flat[part] = _plain(device_map[name])
    return flat


def _plain(device: Device) -> Device:
    """Return ``"cpu"`` for any name of the host, other devices unchanged."""
    return "cpu" if isinstance(device, torch.device) and device.type == "cpu" else device


def _remaining_parts(name: str, model: nn.Module, nested: Collection[str]) -> Iterator[str]:
    """Yield the largest parts of the module ``name`` that neither are nor contain one of ``nested``."""
    for part, _ in direct_parts(model.get_submodule(name)):
        path = f"{name}.{part}" if name else part
        if any(key.startswith(f"{path}.") for key in nested) and path not in nested:
            yield from _remaining_parts(path, model, nested)
        elif path not in nested:
            yield path


def _weights(
    model: nn.Module,
    device_map: Mapping[str, Device],
    main: Device,
    resident: Collection[str],
    state_dict: Mapping[str, torch.Tensor] | None,
    folder: str | os.PathLike[str] | None,
    index: Mapping[str, Mapping[str, Any]] | None,
) -> OffloadedWeightsLoader | None:
    """Return the source of offloaded parts' weights; buffers that are ``resident`` may be missing there."""
    on_host = [name for name, device in device_map.items() if device == "cpu"]
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if main != "cpu" and state_dict is None and on_host:
        state_dict = extract_submodules_state_dict(model.state_dict(), on_host)
    if on_disk and index is None:
        if folder is None:
            raise ArgumentError(f"device_map has {first_few(on_disk)} on 'disk': pass offload_dir")
        _write_offloaded(extract_submodules_state_dict(model.state_dict(), on_disk), resident, Path(folder))
    if state_dict is None and not on_disk and index is None:
        return None
    return OffloadedWeightsLoader(
        state_dict=state_dict,
        save_folder=folder if on_disk else None,
        index=index,
        device=main,
    )


def _copies_of_tied(model: nn.Module, ties: list[list[str]]) -> TiedParams:
    """Return, by address, an empty dict for the copies of each tied weight."""
    tied: TiedParams = {}
    for group in ties:
        for name in group:
            param = tensor_named(model, name)
            if param is not None and param.device != META:
                tied[param.data_ptr()] = {}
    return tied


def _guard_moves(model: nn.Module) -> None:
    """Make ``model.to(…)`` and the like warn about a move, and raise if weights are on the meta device."""
    guarded: Any = model
    for method in dict.fromkeys(["to", accelerator_type() or "cuda"]):
        if hasattr(type(model), method):
            # A partial, so that a deep copy of the model guards the copy and not the original.
            setattr(guarded, method, functools.partial(_move_guarded, model, method))


def _move_guarded(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    if method != "to" or torch._C._nn._parse_to(*args, **kwargs)[0] is not None:
        logger.warning("%s is dispatched over devices by hooks and should not be moved", type(model).__name__)
    if any(param.device == META for param in model.parameters()):
        raise StateError(
            f"{type(model).__name__} has weights offloaded to the host or the disk and cannot be moved or cast: "
            "remove its hooks first, with remove_hook_from_module(model, recurse=True)"
        )
    return getattr(type(model), method)(model, *args, **kwargs)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> nn.Module:
    """Call `load_checkpoint_in_model`, then `dispatch_model` if there is a device map; return the model.

    A map is inferred within ``max_memory`` for ``"auto"`` and ``"balanced"`` (fill accelerators equally),
    ``"balanced_low_0"`` (leave the first as empty as possible) and ``"sequential"`` (fill one after the other).
    """
    if isinstance(device_map, str):
        device_map = infer_map(
            device_map, model, max_memory, no_split_module_classes, dtype, offload_buffers=offload_buffers
        )
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
    )
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def infer_map(
    strategy: str,
    model: nn.Module,
    max_memory: MaxMemory | None,
    no_split: Collection[str] | None,
    dtype: Dtype | None,
    *,
    special_dtypes: Mapping[str, Dtype] | None = None,
    offload_buffers: bool = False,
) -> dict[str, int | str]:
    """Infer a device map by a strategy of `load_checkpoint_and_dispatch`. Raises `ArgumentError` for another name."""
    one_of(strategy, _STRATEGIES, source="device_map")
    if strategy != "sequential":
        max_memory = dict(
            get_balanced_memory(
                model,
                max_memory=max_memory,
                no_split_module_classes=no_split,
                dtype=dtype,
                special_dtypes=special_dtypes,
                low_zero=strategy == "balanced_low_0",
            )
        )
    return infer_auto_device_map(
        model,
        max_memory=max_memory,
        no_split_module_classes=no_split,
        dtype=dtype,
        special_dtypes=special_dtypes,
        offload_buffers=offload_buffers,
    )
