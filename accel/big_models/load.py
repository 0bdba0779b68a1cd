"""Loading a checkpoint into a model, each tensor directly to its device, and an offloaded model's state dict."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.big_models.align import align_module_device, has_offloaded_params
from accel.big_models.checkpoint_shards import CheckpointFiles, Shard, find_files, first_few, in_memory, offload_entry
from accel.big_models.device_map import check_tied_parameters_on_same_device, device_of, warn_if_untied
from accel.big_models.devices import CPU, META, Device, accelerator_type, as_device, dtype_named
from accel.big_models.module_tensors import (
    SCALES,
    find_tied_parameters,
    is_real,
    like_parameter,
    owner_of,
    quantises_on_move,
    replacement,
    retie_parameters,
    scales_name,
    set_module_tensor_to_device,
    tensor_named,
)
from accel.big_models.offload import (
    Index,
    OffloadedWeightsLoader,
    WeightFiles,
    alias_weight,
    load_offloaded_weight,
    offload_weight,
    save_offload_index,
)
from accel.errors import ArgumentError, CheckpointError, nearest

logger = logging.getLogger(__name__)

_BATCH = 1 << 27  # bytes


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load ``checkpoint`` into ``model``, which may be on the meta device; see `dispatch_model` for running it.

    ``checkpoint`` is a file of weights (safetensors, or `torch.save`'s, from which only tensors are loaded), an
    index of such files, or a folder with either. Memory holds the weights that stay there and one more tensor.

    - ``device_map``: module → device, including ``"disk"``. Without it, weights are put on the devices of the
      model's tensors, and on the host for those on the meta device.
    - ``offload_folder``: the folder for the index of the weights on ``"disk"``. Weights of a safetensors file in
      their final type stay in that file, which must not be moved; others are written to the folder.
    - ``dtype``: the type of floating-point weights; by default that of the model's tensors.
    - ``keep_in_fp32_modules``: modules that stay in float32 nevertheless.
    - ``strict``: a missing or unexpected weight is an error, not a warning. Nothing is changed in that case.
    - ``offload_buffers``: offload buffers of modules on ``"disk"`` too.
    - ``broadcast_from_rank0``: only process 0 reads; ``full_state_dict`` is for models whose parameters are
      sharded.
    - ``offload_state_dict``: no effect, as a whole file is never in memory. ``offload_8bit_bnb``: no effect, as
      weights of layers of bitsandbytes are quantised, or are in the checkpoint already.

    Raises `CheckpointError` for a checkpoint that is missing, damaged, or shares no name with the model, and for
    a weight of another shape; `ArgumentError` for a device map that omits a weight.
    """
    on_disk = device_map is not None and "disk" in device_map.values()
    if on_disk and offload_folder is None:
        raise ArgumentError("device_map has 'disk': pass offload_folder for the index of the weights there")
    warn_if_untied(model)
    ties = find_tied_parameters(model)
    if device_map is not None:
        check_tied_parameters_on_same_device(ties, device_map)
    if broadcast_from_rank0 or _is_sharded(model):
        if device_map is not None:
            raise ArgumentError("device_map cannot be combined with broadcast_from_rank0 or sharded parameters")
        _load_distributed(model, checkpoint, ties, strict, full_state_dict, broadcast_from_rank0)
        return
    files = find_files(checkpoint)
    common_names = _check_names(model, files.names(), ties, checkpoint, strict)
    placer = _WeightPlacer(
        model=model,
        files=files,
        device_map=device_map,
        folder=None if not on_disk or offload_folder is None else Path(offload_folder),
        dtype=dtype_named(dtype),
        offload_buffers=offload_buffers,
        in_fp32=keep_in_fp32_modules or (),
    )
    for shard in files.shards():
        for name in shard.names():
            if name in common_names:
                placer.place(shard, name)
    placer.finish(ties)


class _WeightPlacer:
    """The placement of a checkpoint's weights according to a device map."""

    def __init__(
        self,
        *,
        model: nn.Module,
        files: CheckpointFiles,
        device_map: Mapping[str, Device] | None,
        folder: Path | None,
        dtype: torch.dtype | None,
        offload_buffers: bool,
        in_fp32: Collection[str],
    ) -> None:
        self._model = model
        self._checkpoint = files
        self._names = set(files.names())
        self._parts_4bit = _parts_4bit(self._names)
        self._map = device_map
        self._folder = folder
        self._dtype = dtype
        self._in_fp32 = in_fp32
        self._in_place = set() if offload_buffers else {name for name, _ in model.named_buffers()}
        self._index: Index = {}
        self._placed_names: list[str] = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._files = WeightFiles(folder)

    def place(self, shard: Shard, name: str) -> None:
        old = tensor_named(self._model, name)
        if old is None:
            raise CheckpointError(f"{shard.path} holds {name}, which is None in {type(self._model).__name__}")
        value = shard.get(name)
        self._placed_names.append(name)
        state = self._quant_state(name)
        if state:
            self._place_4bit(name, old, in_memory(value), state)
            return
        if old.shape != value.shape and not hasattr(old, "quant_state"):
            saved, shape = tuple(value.shape), tuple(old.shape)
            raise CheckpointError(
                f"{shard.path}: {name} has shape {saved}, but {shape} in {type(self._model).__name__}"
            )
        dtype = self._type_of(name, old, value)
        device = self._device_for(name, old)
        if device == "disk" and name not in self._in_place:
            self._to_disk(shard, name, value, dtype)
        else:
            target = CPU if device == "disk" else as_device(device)
            self._to_device(name, value, dtype, target)

    def _quant_state(self, name: str) -> dict[str, torch.Tensor]:
        """Return what bitsandbytes saves with a weight in 4 bits; empty for other weights."""
        keys = self._parts_4bit.get(name, ())
        return {key: in_memory(self._checkpoint.get(key)) for key in keys}

    def _place_4bit(self, name: str, old: Any, value: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        device = self._device_for(name, old)
        if not hasattr(old, "quant_state"):
            raise CheckpointError(f"the checkpoint has {name} in 4 bits: load it with load_and_quantize_model")
        if device == "disk":
            raise ArgumentError(f"device_map puts {name} on 'disk', where weights in 4 bits cannot be")
        owner, key = owner_of(self._model, name)
        owner._parameters[key] = type(old).from_prequantized(value, state, device=as_device(device), module=owner)

    def _type_of(self, name: str, old: torch.Tensor, value: torch.Tensor) -> torch.dtype:
        if self._dtype is None:
            return old.dtype
        if not is_real(value):
            return value.dtype
        path = f".{name}."
        return torch.float32 if any(f".{part}." in path for part in self._in_fp32) else self._dtype

    def _device_for(self, name: str, old: torch.Tensor) -> Device:
        if self._map is None:
            return CPU if old.device == META else old.device
        device = device_of(name, self._map)
        if device is None:
            raise ArgumentError(f"device_map has no device for {name}{nearest(name, self._map)}")
        return device

    def _to_device(self, name: str, value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
        scales = self._scales(name, value)
        value = in_memory(value, device, dtype)
        set_module_tensor_to_device(
            self._model, name, device, value=value, dtype=dtype, fp16_statistics=scales, clear_cache=False
        )

    def _scales(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """Return the scales of a weight that the checkpoint has in int8."""
        saved = value.dtype == torch.int8 and scales_name(name) in self._names
        return in_memory(self._checkpoint.get(scales_name(name))) if saved else None

    def _to_disk(self, shard: Shard, name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
        old = tensor_named(self._model, name)
        if old is not None and quantises_on_move(old):
            assert self._folder is not None
            scales = self._scales(name, value)
            quantize_and_offload_8bit(self._model, in_memory(value), name, dtype, self._folder, self._index, scales)
            return
        entry = offload_entry(shard, name) if value.dtype == dtype else None
        if entry is None:
            self._index[name] = self._files.write(in_memory(value), name, dtype)
        else:
            self._index[name] = {**entry, "dtype": str(dtype).removeprefix("torch."), "shape": list(value.shape)}
        set_module_tensor_to_device(self._model, name, META, dtype=dtype)

    def finish(self, ties: list[list[str]]) -> None:
        """Restore ties from the names that were loaded, and write the index."""
        for group in ties:
            loaded = [name for name in group if name in self._placed_names]
            retie_parameters(self._model, [[*loaded, *(name for name in group if name not in loaded)]])
            self._alias([name for name in loaded if name in self._index], group)
            self._copy_from_disk([name for name in loaded if name in self._index], group)
        if self._folder is not None:
            save_offload_index(self._index, self._folder)

    def _alias(self, offloaded: list[str], group: list[str]) -> None:
        """Add all names of a weight on the disk to the index."""
        if not offloaded or self._map is None or self._folder is None:
            return
        for name in group:
            if name not in self._index and device_of(name, self._map) == "disk":
                self._index[name] = self._index[offloaded[0]]
                if "safetensors_file" not in self._index[name]:
                    alias_weight(offloaded[0], name, self._folder)

    def _copy_from_disk(self, offloaded: list[str], group: list[str]) -> None:
        """Copy a weight on the disk to tied names that are neither there nor in the checkpoint."""
        for name in group if offloaded else ():
            old = tensor_named(self._model, name)
            if name not in self._index and old is not None and old.device == META:
                value = OffloadedWeightsLoader(index=self._index, save_folder=self._folder)[offloaded[0]]
                device = as_device(self._device_for(name, old))
                set_module_tensor_to_device(self._model, name, device, in_memory(value, device), clear_cache=False)


def _check_names(
    model: nn.Module, present: Collection[str], ties: list[list[str]], checkpoint: Any, strict: bool
) -> set[str]:
    """Return the names that checkpoint and model share. A tied weight is present if any of its names is."""
    kind = type(model).__name__
    expected = [name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)]
    common_names = set(present) & set(expected)
    if not common_names and expected:
        raise CheckpointError(
            f"{checkpoint} shares no name with {kind}: it holds {first_few(sorted(present), 2)}; "
            f"the model has {first_few(expected, 2)}"
        )
    covered = common_names | {name for group in ties if common_names & set(group) for name in group}
    missing = [name for name in expected if name not in covered]
    unexpected = [name for name in present if name not in common_names and not _is_quantised_part(name, common_names)]
    lines = []
    if missing:
        lines.append(f"lacks {first_few(missing)}")
    if unexpected:
        lines.append(f"holds {first_few(unexpected)}, which {kind} lacks{nearest(unexpected[0], missing)}")
    if lines and strict:
        raise CheckpointError(f"{checkpoint} {'; it '.join(lines)}")
    if lines:
        logger.warning("%s %s", checkpoint, "; it ".join(lines))
    return common_names


def _is_quantised_part(name: str, weights: Collection[str]) -> bool:
    """Return True for what bitsandbytes saves with a weight: scales, or the state of one in 4 bits."""
    return name.endswith((SCALES, "weight_format")) or any(weight in weights for weight in _parts_4bit([name]))


def _parts_4bit(names: Iterable[str]) -> dict[str, list[str]]:
    """Map each weight in 4 bits to the names of its further tensors, such as its scales."""
    parts: dict[str, list[str]] = {}
    for name in names:
        layer, separator, _ = name.rpartition("weight.")
        if separator:
            parts.setdefault(f"{layer}weight", []).append(name)
    return parts


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(param, "device_mesh") for param in model.parameters())


def _load_distributed(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    ties: list[list[str]],
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> None:
    """Load with `torch.distributed.checkpoint`, which supports sharded parameters and can broadcast them."""
    from torch import distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    if broadcast_from_rank0 and not dist.is_initialized():
        raise ArgumentError("broadcast_from_rank0 needs a process group: create an Accelerator() first")
    is_reader = not broadcast_from_rank0 or dist.get_rank() == 0
    outcome: list[Any] = [None, None]
    files: CheckpointFiles | None = None
    if is_reader:
        try:
            files = find_files(checkpoint)
            common_names = _check_names(model, files.names(), ties, checkpoint, strict)
            outcome = [[path.name for path in files.paths], None]
        except CheckpointError as error:
            outcome = [None, str(error)]
    if broadcast_from_rank0:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0, strict=False)
    batches = iter(()) if files is None else _batches(files, common_names)
    while True:
        values = next(batches, None)
        more = [values is not None]
        if broadcast_from_rank0:
            dist.broadcast_object_list(more, src=0)
        if not more[0]:
            return
        set_model_state_dict(model, values or {}, options=options)


def _batches(files: CheckpointFiles, names: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the tensors called ``names`` in memory, _BATCH bytes at a time."""
    batch: dict[str, Any] = {}
    size = 0
    for shard in files.shards():
        for name in shard.names():
            if name in names:
                batch[name] = in_memory(shard.get(name))
                size += batch[name].nbytes
            if size >= _BATCH:
                yield batch
                batch, size = {}, 0
    if batch:
        yield batch


def load_offloaded_weights(model: nn.Module, index: Index | None, offload_folder: str | os.PathLike[str]) -> None:
    """Load the weights in ``index`` from the files in ``offload_folder`` into ``model``, on the host."""
    for name, entry in (index or {}).items():
        if name.endswith(SCALES):
            continue
        value = load_offloaded_weight(os.path.join(offload_folder, f"{name}.dat"), entry)
        scales = scales_name(name)
        statistics = None
        if value.dtype == torch.int8 and index is not None and scales in index:
            statistics = load_offloaded_weight(os.path.join(offload_folder, f"{scales}.dat"), index[scales])
        set_module_tensor_to_device(
            model, name, CPU, value=in_memory(value, CPU), fp16_statistics=statistics, clear_cache=False
        )


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype | None,
    offload_folder: str | os.PathLike[str],
    offload_index: Index,
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write the int8 weight ``param_name`` of a layer of bitsandbytes and its scales to ``offload_folder``.

    ``param`` is quantised first, as ``new_dtype``, unless ``fp16_statistics`` has its scales. Both get entries in
    ``offload_index``; the model's weight is on the meta device afterwards. Raises `ArgumentError` for another layer.
    """
    owner, key = owner_of(model, param_name)
    old: Any = owner._parameters.get(key)
    if not hasattr(old, SCALES):
        raise ArgumentError(f"{param_name} cannot be offloaded: it is no weight of an 8-bit layer of bitsandbytes")
    data: Any = param
    if fp16_statistics is None:
        data = replacement(old, as_device(accelerator_type() or CPU), param, new_dtype, name=param_name)
        fp16_statistics = data.SCB
    assert fp16_statistics is not None
    offload_weight(data.detach().cpu(), param_name, offload_folder, offload_index)
    offload_weight(fp16_statistics.cpu(), scales_name(param_name), offload_folder, offload_index)
    owner._parameters[key] = like_parameter(old, torch.empty_like(data, device=META))


# The complete state dict of a model with offloaded weights.


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` with every tensor on the host, moved there module by module.

    A weight offloaded to disk is memory-mapped. Tensors without values anywhere are omitted, with a warning.
    """
    state: dict[str, Any] = {}
    order = list(model.state_dict())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        with align_module_device(module, "cpu" if has_offloaded_params(module) else None):
            for name, value in module.state_dict(prefix=prefix).items():
                if isinstance(value, torch.Tensor):
                    if value.device == META or name in state:
                        continue
                    value = value.to("cpu")
                state.setdefault(name, value)
    empty = [name for name in order if name not in state]
    if empty:
        logger.warning("omitted from the state dict because they have no values: %s", first_few(empty))
    return {name: state[name] for name in order if name in state}


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Device = "cpu",
) -> dict[str, Any]:
    """Fill in, and return, the entries of ``state_dict`` that belong to ``module``.

    ``module_name``: the name of one of the module's tensors. Offloaded weights are moved to ``device_to_put_offload``.
    """
    path = module_name.rpartition(".")[0]
    with align_module_device(module, device_to_put_offload if has_offloaded_params(module) else None):
        for name, value in module.state_dict(prefix=f"{path}." if path else "").items():
            if name in state_dict:
                state_dict[name] = value
    return state_dict
