"""Sharded tensors, models and optimizers, stored in chunks that any number of processes can read back.

A process writes one safetensors file, ``chunks/node_<node>/rank_<rank>.safetensors``. The entry
``accel_chunks`` of its metadata maps each chunk to its full tensor and its offset there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from accel.checkpoint.file_names import CHUNKS
from accel.checkpoint.tensors import load_optimizer
from accel.errors import CheckpointError
from accel.parallel.shares import is_sharded
from accel.tensor_files import SafetensorsFile, cut

_TABLE = "accel_chunks"

Dims: TypeAlias = tuple[int, ...]  # a shape, or an offset


def local_offset(tensor: Any) -> tuple[Dims, torch.Tensor]:
    """Return the offset of this process's part of ``tensor``, and the part, which shares its memory."""
    if not is_sharded(tensor):
        return (0,) * tensor.ndim, tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offset), tensor.to_local()


def chunks_to_write(
    tensors: Mapping[str, torch.Tensor], *, is_writer: bool, every_copy: bool
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the parts of ``tensors`` that this process writes, and the metadata of their file.

    ``is_writer``: True if it writes tensors that every process holds in full.
    ``every_copy``: True if it also writes parts that other processes hold, since its disk is its own.
    """
    parts: dict[str, torch.Tensor] = {}
    table: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if (every_copy or _is_first_copy(tensor)) if is_sharded(tensor) else is_writer:
            offset, part = local_offset(tensor)
            parts[name] = part.detach()
            table[name] = [list(tensor.shape), list(offset)]
    return parts, {_TABLE: json.dumps(table)}


def _is_first_copy(tensor: Any) -> bool:
    coordinates = tensor.device_mesh.get_coordinate()
    return not any(
        index for index, placement in zip(coordinates, tensor.placements, strict=True) if placement.is_replicate()
    )


class Chunks:
    """Saved tensors by name, each in the chunks it was written in. ``folder``: the checkpoint, for error messages."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.shapes: dict[str, Dims] = {}
        self._chunks: dict[str, dict[tuple[Dims, Dims], Any]] = {}

    @classmethod
    def single_chunk(cls, tensors: Mapping[str, torch.Tensor], folder: str) -> Chunks:
        """Create from full tensors, with one chunk each."""
        saved = cls(folder)
        for name, tensor in tensors.items():
            saved.add(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)
        return saved

    @classmethod
    def in_folder(cls, folder: Path) -> Chunks:
        """Find all chunks of a checkpoint. Raises `CheckpointError` for a damaged file."""
        saved = cls(str(folder))
        for path in sorted(folder.glob(CHUNKS)):
            file = SafetensorsFile(path)
            try:
                for name, (shape, offset) in json.loads(file.metadata[_TABLE]).items():
                    saved.add(name, tuple(shape), tuple(offset), file.tensors[name])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be loaded: its table of chunks is damaged") from error
        return saved

    def add(self, name: str, shape: Dims, offset: Dims, data: Any) -> None:
        """Add a chunk of the tensor ``name``: a tensor, or an object that opens one."""
        if self.shapes.setdefault(name, shape) != shape:
            raise CheckpointError(f"{self.folder}: {name} is {self.shapes[name]} in one file, but {shape} in another")
        self._chunks.setdefault(name, {})[offset, tuple(data.shape)] = data

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def under(self, prefix: str) -> list[str]:
        """Return the names that begin with ``prefix``, without it."""
        return [name.removeprefix(prefix) for name in self.shapes if name.startswith(prefix)]

    def renamed(self, names: Mapping[str, str]) -> Chunks:
        """Return a subset under new names; ``names`` maps new names to existing ones."""
        saved = Chunks(self.folder)
        saved.shapes = {name: self.shapes[old] for name, old in names.items()}
        saved._chunks = {name: self._chunks[old] for name, old in names.items()}
        return saved

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the saved tensor."""
        kind: torch.dtype = next(iter(self._chunks[name].values())).dtype
        return kind

    def gathered(self, prefix: str) -> dict[str, torch.Tensor]:
        """Return full tensors in memory, by the names under ``prefix``; tied names share one tensor."""
        buffers: dict[int, torch.Tensor] = {}
        tensors: dict[str, torch.Tensor] = {}
        for name in self.under(prefix):
            first = next(iter(self._chunks[prefix + name].values()))
            if id(first) not in buffers:
                buffers[id(first)] = torch.empty(self.shapes[prefix + name], dtype=first.dtype)
                self.fill(prefix + name, buffers[id(first)])
            tensors[name] = buffers[id(first)]
        return tensors

    @torch.no_grad()
    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Copy what was saved under ``name`` to this process's part of ``tensor``.

        Raises `CheckpointError` if the full shapes differ or chunks of this part are missing.
        """
        if self.shapes[name] != tuple(tensor.shape):
            raise CheckpointError(
                f"{self.folder}: {name} has shape {self.shapes[name]}, but {tuple(tensor.shape)} in this run"
            )
        offset, part = local_offset(tensor)
        missing = part.numel()
        for (start, size), data in self._chunks[name].items():
            common = [
                (max(a, b), min(a + m, b + n)) for a, m, b, n in zip(offset, part.shape, start, size, strict=True)
            ]
            if all(first < stop for first, stop in common):
                tensor_part = cut(data if isinstance(data, torch.Tensor) else data.open(), _slices(common, start))
                target = part[_slices(common, offset)]
                target.copy_(tensor_part)
                missing -= target.numel()
        if missing:
            raise CheckpointError(
                f"{self.folder}: {missing} elements of {name} are missing{self._missing_ranks_hint()}"
            )

    def _missing_ranks_hint(self) -> str:
        files = list(Path(self.folder).glob(CHUNKS))
        nodes = sorted({path.parent.name.removeprefix("node_") for path in files}, key=int)
        ranks = sorted({path.stem.removeprefix("rank_") for path in files}, key=int)
        if not files:
            return ""
        return (
            f": it has only the chunks of rank {', '.join(ranks)} on node {', '.join(nodes)}. Load it with "
            "the processes that saved it, or save to a file system that all nodes share"
        )


def _slices(common: Sequence[tuple[int, int]], start: Dims) -> tuple[slice, ...]:
    return tuple(slice(first - offset, stop - offset) for (first, stop), offset in zip(common, start, strict=True))


# Models and optimizers: splitting them into chunks, and filling them from chunks in any world.
#
# Optimizer state is keyed by parameter names, so that the order of parameters may differ.

NameOf: TypeAlias = Callable[[torch.Tensor], str]


def split_optimizer(optimizer: Any, name_of: NameOf) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split the state of ``optimizer`` into an outline and, under ``name:key``, the tensors for chunks.

    The outline is the state dict with names in place of numbers; its ``chunked`` lists the keys of the removed
    tensors.
    """
    state = optimizer.state_dict()
    return split_optimizer_state(state, _names_by_number(optimizer, state, name_of))


def _names_by_number(optimizer: Any, state: Mapping[str, Any], name_of: NameOf) -> dict[int, str]:
    """Map each parameter number in ``state`` to the name of its parameter."""
    saved_sizes, sizes = (
        [len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)
    )
    if saved_sizes != sizes:
        raise ValueError(f"its groups have {saved_sizes} parameters, but {sizes} in this run")
    return {
        number: name_of(parameter)
        for saved, present in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(saved["params"], present["params"], strict=True)
    }


def split_optimizer_state(
    state: Mapping[str, Any], names: Mapping[Any, str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split a state dict as `split_optimizer` does; ``names`` maps its parameter keys to names."""
    outline: dict[str, Any] = {"state": {}, "chunked": {}}
    tensors: dict[str, torch.Tensor] = {}
    for number, entry in state["state"].items():
        name = names[number]
        chunked = [key for key, value in entry.items() if isinstance(value, torch.Tensor) and value.ndim]
        outline["state"][name] = {key: value for key, value in entry.items() if key not in chunked}
        outline["chunked"][name] = chunked
        tensors.update({f"{name}:{key}": entry[key] for key in chunked})
    outline["param_groups"] = [
        {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
    ]
    return outline, tensors


def fill_optimizer(
    optimizer: Any, name_of: NameOf, outline: Mapping[str, Any], saved: Chunks, prefix: str = ""
) -> None:
    """Load the result of `split_optimizer` into this process's parts. Raises `CheckpointError` for a mismatch.

    ``prefix``: the prefix of the names in ``saved``.
    """
    groups, state = [], {}
    number = 0
    if len(outline["param_groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{saved.folder}: {len(outline['param_groups'])} parameter group(s), but "
            f"{len(optimizer.param_groups)} in this run"
        )
    for saved_group, group in zip(outline["param_groups"], optimizer.param_groups, strict=True):
        parameters = {name_of(parameter): parameter for parameter in group["params"]}
        extra = sorted(set(saved_group["params"]) ^ set(parameters))
        if extra:
            raise CheckpointError(f"{saved.folder}: parameter groups differ from this run's, first in {extra[0]}")
        for name, parameter in parameters.items():
            entry = dict(outline["state"].get(name, {}))
            current = optimizer.state.get(parameter, {})
            for key in outline["chunked"].get(name, ()):
                entry[key] = _filled(saved, f"{prefix}{name}:{key}", parameter, current.get(key))
            if entry:
                state[number] = entry
            number += 1
        groups.append({**saved_group, "params": list(range(number - len(parameters), number))})
    load_optimizer(optimizer, {"state": state, "param_groups": groups})


def _filled(saved: Chunks, name: str, parameter: torch.Tensor, current: Any) -> torch.Tensor:
    if name not in saved:
        raise CheckpointError(f"{saved.folder}: {name} is missing")
    shape, dtype = saved.shapes[name], saved.dtype(name)
    if isinstance(current, torch.Tensor) and tuple(current.shape) == shape and current.dtype == dtype:
        tensor = current
    elif shape == tuple(parameter.shape):
        tensor = torch.empty_like(parameter.detach(), dtype=dtype)
    else:
        tensor = torch.empty(shape, dtype=dtype, device=parameter.device)
    saved.fill(name, tensor)
    return _on_device_of(tensor, parameter)


def _on_device_of(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return ``value`` in a form that can be combined with ``parameter``: replicated if that is sharded."""
    if is_sharded(value) or not is_sharded(parameter):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def fill_optimizer_from_full_state(optimizer: Any, state: Mapping[str, Any], folder: Path) -> None:
    """Load the state dict of an unsharded optimizer into this process's parts, by the order of parameters."""
    identities = _names_by_number(optimizer, state, lambda parameter: str(id(parameter)))
    outline, tensors = split_optimizer_state(state, identities)
    fill_optimizer(optimizer, lambda parameter: str(id(parameter)), outline, Chunks.single_chunk(tensors, str(folder)))


def fill_module(
    module: nn.Module, saved: Chunks, prefix: str = "", extra: Mapping[str, Any] | None = None, strict: bool = True
) -> None:
    """Load weights and buffers of ``saved`` into this process's parts of ``module``, and ``extra`` as it is.

    Raises `CheckpointError` for a shape that differs and, if ``strict``, for names that only one side has.
    """
    expected = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    ties = {name: names for names in groups.values() for name in names}
    missing = []
    for name, value in expected.items():
        saved_name = next((alias for alias in (name, *ties.get(name, ())) if prefix + alias in saved), None)
        if saved_name is None:
            missing.append(name)
        else:
            saved.fill(prefix + saved_name, value)
    unexpected = [name for name in saved.under(prefix) if name not in expected]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{saved.folder} lacks {missing[0]}" if missing else f"{saved.folder}: this run has no {unexpected[0]}"
        )
    if extra:
        module.load_state_dict(dict(extra), strict=False)
