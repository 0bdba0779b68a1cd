"""The contents of a checkpoint: a run's objects, their files (named as Accelerate's), and how they are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy
import torch

from accel.checkpoint.chunks import (
    Chunks,
    chunks_to_write,
    fill_module,
    fill_optimizer,
    fill_optimizer_from_full_state,
    own_name,
    split_optimizer,
)
from accel.checkpoint.durable import Digest
from accel.checkpoint.file_names import (
    EXTRA,
    OPTIMIZER,
    OUTLINE,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAMPLER,
    SCALER_NAME,
    SCHEDULER,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    chunks_name,
    custom_name,
    gradients_name,
    numbered_name,
    random_states_name,
)
from accel.checkpoint.tensors import fits_safetensors, load_module, read_tensors, write_tensors
from accel.checkpoint.torch_files import random_states, read_object, set_random_states, write_safe_object
from accel.checkpoint.weights import read_weights
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.parallel.base import Strategy
from accel.parallel.shares import count_versions, is_sharded
from accel.precision.base import Precision
from accel.pytree import map_nested
from accel.state import PartialState
from accel.world.environment import read_int

logger = get_logger(__name__)


@dataclass(frozen=True)
class Piece:
    """One file of a checkpoint and its content."""

    name: str
    kind: Literal["tensors", "object"]
    value: Any
    metadata: dict[str, str] | None = None  # of a file of tensors

    def write(self, folder: Path) -> Digest:
        """Write the file in ``folder`` and flush it to the disk."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        return (
            write_tensors(path, self.value, self.metadata)
            if self.kind == "tensors"
            else write_safe_object(path, self.value)
        )


@dataclass(kw_only=True)
class CheckpointContents:
    """The objects of a run that a checkpoint holds, in the order of `prepare`.

    ``hooked``: the numbers of the models whose weights a hook of the script loads.
    ``options``: options of `torch.load`.
    """

    device: torch.device
    process_index: int
    strategy: Strategy
    precision: Precision
    models: Sequence[torch.nn.Module] = ()
    hooked: Sequence[int] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    safe: bool = True
    options: dict[str, Any] | None = None

    @property
    def stateful(self) -> Iterator[tuple[str, Any]]:
        """Yield (file name, object) of schedulers, scaler and registered objects."""
        for index, scheduler in enumerate(self.schedulers):
            yield numbered_name(SCHEDULER, index), scheduler
        if self.precision.scaler is not None:
            yield SCALER_NAME, self.precision.scaler
        for index, item in enumerate(self.custom):
            yield custom_name(index), item

    @property
    def samplers(self) -> Iterator[tuple[str, Any]]:
        """Yield (file name, loader) of the loaders that have a position to save."""
        for index, loader in enumerate(self.loaders):
            if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
                yield numbered_name(SAMPLER, index), loader

    def shared(self, weights: Mapping[int, dict[str, Any]], states: Sequence[dict[str, Any]]) -> Iterator[Piece]:
        """Yield the files that are the same on every process.

        ``weights``: the state dicts of the models, by number, without those that a hook has taken.
        ``states``: the state dicts of the optimizers.
        """
        self.precision.finish_pending()
        for index, state in weights.items():
            yield from self._weights(index, state)
        for index, state in enumerate(states):
            yield _object(numbered_name(OPTIMIZER, index), state)
        yield from self._objects()

    def _objects(self) -> Iterator[Piece]:
        for name, item in (*self.stateful, *self.samplers):
            yield _object(name, item.state_dict())

    def sharded_state(
        self, weights: Mapping[int, dict[str, Any]], window_open: bool, *, is_writer: bool, every_copy: bool
    ) -> Iterator[Piece]:
        """Yield this process's chunks of sharded tensors and, on a writer, the files common to all processes.

        If checkpoints hold full models, the chunks are only gradients of an open window, and buffers of which each
        process has its own. Collective: all processes must call it.

        ``weights``: see `shared`.
        ``is_writer``, ``every_copy``: see `chunks_to_write`.
        """
        self.precision.finish_pending()
        in_shards = self.strategy.keeps_shards
        tensors: dict[str, torch.Tensor] = {}
        common: list[Piece] = []
        if window_open and self._is_sharded:
            tensors.update({f"gradient.{name}": p.grad for name, p in self._parameters() if p.grad is not None})
        for index, state in weights.items():
            if not in_shards:
                tensors.update({f"buffer.{index}.{key}": value for key, value in self._own_buffers(index).items()})
                continue
            tensors.update({f"model.{index}.{key}": value for key, value in state.items() if fits_safetensors(value)})
            common += self._extra(index, state)
        versions = count_versions(tensors) if self._is_sharded or self.strategy.own_buffers else {}
        if not in_shards:
            tensors = {n: value for n, value in tensors.items() if n.startswith("gradient.") or versions[n] > 1}
        for index, optimizer in enumerate(self.optimizers if in_shards else ()):
            outline, state = split_optimizer(optimizer, self._names)
            tensors.update({f"optimizer.{index}.{path}": value for path, value in state.items()})
            versions.update({f"optimizer.{index}.{path}": number for path, number in outline["versions"].items()})
            common.append(_object(numbered_name(OUTLINE, index), outline))
        if tensors:
            parts, table = chunks_to_write(tensors, versions, is_writer=is_writer, every_copy=every_copy)
            node = read_int(os.environ, "GROUP_RANK", minimum=0) or 0
            yield Piece(chunks_name(node, self.process_index), "tensors", parts, table)
        if is_writer and in_shards:
            yield from common
            yield from self._objects()

    def _own_buffers(self, index: int) -> dict[str, torch.Tensor]:
        if not self.strategy.own_buffers:
            return {}
        model = self.strategy.unwrap(self.models[index])
        saved = model.state_dict()
        return {name: value for name, value in model.named_buffers() if name in saved and fits_safetensors(value)}

    @property
    def _is_sharded(self) -> bool:
        return any(is_sharded(parameter) for _, parameter in self._parameters())

    @cached_property
    def _names_by_id(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._parameters()}

    def _names(self, parameter: torch.Tensor) -> str:
        if id(parameter) not in self._names_by_id:
            raise CheckpointError(
                f"an optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no prepared model, "
                "and a sharded checkpoint needs its name: prepare its model too"
            )
        return self._names_by_id[id(parameter)]

    def _weights(self, index: int, state: dict[str, Any]) -> Iterator[Piece]:
        if not self.safe:
            yield Piece(numbered_name(WEIGHTS_NAME, index), "object", state)
            return
        tensors = {key: value for key, value in state.items() if fits_safetensors(value)}
        yield Piece(numbered_name(SAFE_WEIGHTS_NAME, index), "tensors", tensors)
        yield from self._extra(index, state)

    def _extra(self, index: int, state: dict[str, Any]) -> Iterator[Piece]:
        """Yield the file of what safetensors cannot hold: extra state, sparse buffers."""
        extra = {key: value for key, value in state.items() if not fits_safetensors(value)}
        if extra:
            yield Piece(numbered_name(EXTRA, index), "object", extra)

    def rank_state(self, step: int, window_open: bool) -> Iterator[Piece]:
        """Yield the files of this process alone: its generators, its loaders' own state, and ``step`` of its window.

        In an open window, also its accumulated gradients, which no other process has.
        """
        if window_open and not self._is_sharded:
            gradients = {key: p.grad for key, p in self._parameters() if p.grad is not None}
            yield Piece(gradients_name(self.process_index), "object", self.strategy.on_host(gradients))
        states = random_states(step, self.device)
        loaders = [_loader_state(loader) for _, loader in self.samplers]
        if any(state is not None for state in loaders):
            states["loaders"] = loaders
        yield Piece(random_states_name(self.process_index), "object", states)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, model in enumerate(self.models):
            for name, parameter in self.strategy.unwrap(model).named_parameters():
                yield f"{index}.{name}", parameter

    def read(self, folder: Path, **load_model_kwargs: Any) -> int | None:
        """Restore everything; return the step of the accumulation window, ``None`` if none was saved for this process.

        Raises `CheckpointError` naming the file that is missing or does not fit.
        """
        self.precision.finish_pending()
        self.strategy.finish_pending()
        saved = Chunks.in_folder(folder)
        for index, number in self._weight_numbers(folder, saved).items():
            self._read_weights(folder, saved, number, self.strategy.unwrap(self.models[index]), load_model_kwargs)
        for index, optimizer in enumerate(self.optimizers):
            self._read_optimizer(folder, saved, index, optimizer)
        for name, item in self.stateful:
            _load(item, name, self._object(folder / name))
        for name, loader in self.samplers:
            self._read_sampler(folder / name, loader)
        self._read_gradients(folder, saved)
        return self._load_rank_state(folder / random_states_name(self.process_index))

    def _load_rank_state(self, path: Path) -> int | None:
        if not path.exists():
            return None
        states = set_random_states(path, self.device)
        for (_, loader), state in zip(self.samplers, states.get("loaders", ()), strict=False):
            if state is not None and hasattr(loader, "load_own_state_dict"):
                loader.load_own_state_dict(state)
        step: int = states["step"]
        return step

    def _object(self, path: Path, **kwargs: Any) -> Any:
        if not path.exists():
            raise CheckpointError(
                f"{path.parent} has no {path.name}: it was saved with fewer objects prepared, or by another program"
            )
        return read_object(path, **kwargs, **(self.options or {}))

    def _weight_numbers(self, folder: Path, saved: Chunks) -> dict[int, int]:
        """Map the models to load to the numbers of their weights.

        Accelerate, and older versions of accel, number only the models that no hook has taken.
        """
        loaded = [index for index in range(len(self.models)) if index not in self.hooked]
        with_weights = [index for index in loaded if self.strategy.unwrap(self.models[index]).state_dict()]
        same = all(_has_weights(folder, saved, index) for index in with_weights)
        return {index: index if same else position for position, index in enumerate(loaded)}

    def _read_weights(
        self, folder: Path, saved: Chunks, index: int, target: torch.nn.Module, kwargs: dict[str, Any]
    ) -> None:
        path = folder / numbered_name(EXTRA, index)
        extra = read_object(path) if path.exists() else {}
        strict = kwargs.get("strict", True)
        none = not target.state_dict() and not _has_weights(folder, saved, index)  # a criterion, in chunks
        if none or saved.under(f"model.{index}."):
            fill_module(target, saved, f"model.{index}.", extra, strict)
            return
        state = read_weights(folder, index)
        if any(is_sharded(parameter) for parameter in target.parameters()):
            fill_module(target, Chunks.single_chunk(state, str(folder)), "", extra, strict)
            self._fill_own_buffers(saved, index, target)
            return
        state.update(extra)
        expected = target.state_dict()
        if state and all(name.startswith("module.") for name in state) and not set(state) & set(expected):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        _retie(state, expected)
        try:
            load_module(target, state, **kwargs)
        except RuntimeError as error:
            detail = " ".join(str(error).split())
            raise CheckpointError(f"{folder}: model {index} does not fit: {detail}") from error
        self._fill_own_buffers(saved, index, target)

    def _fill_own_buffers(self, saved: Chunks, index: int, target: torch.nn.Module) -> None:
        for name, buffer in target.named_buffers():
            key = own_name(f"buffer.{index}.{name}", PartialState().num_processes)
            if key in saved:
                saved.fill(key, buffer)

    def _read_optimizer(self, folder: Path, saved: Chunks, index: int, optimizer: Any) -> None:
        outline = folder / numbered_name(OUTLINE, index)
        path = outline if outline.exists() else folder / numbered_name(OPTIMIZER, index)
        state = self._object(path, mapped=True)
        try:
            if path == outline:
                fill_optimizer(optimizer, self._names, state, saved, f"optimizer.{index}.")
            else:
                fill_optimizer_from_full_state(optimizer, state, path)
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            raise _mismatch_error(path.name, optimizer, error) from error

    def _read_sampler(self, path: Path, loader: Any) -> None:
        if not path.exists():
            logger.warning(f"{path.parent} has no {path.name}: this loader starts from the beginning")
            return
        try:
            state = self._object(path)
        except CheckpointError as error:
            # Accelerate pickles the sampler itself, which cannot be read safely.
            logger.warning(f"{error}: this loader starts from the beginning")
            return
        _load(loader, path.name, state)

    def _read_gradients(self, folder: Path, saved: Chunks) -> None:
        """Load the gradients of an open window: this process's own or, in another world, the mean of all."""
        self.strategy.drop_held_gradients()
        files = []
        for rank in count():
            path, older = (folder / gradients_name(rank, suffix) for suffix in ("bin", "safetensors"))
            if not path.exists() and not older.exists():
                break
            files.append(read_object(path, mapped=True) if path.exists() else read_tensors(older))
        if len(files) == PartialState().num_processes:
            files = [files[self.process_index]]
        for name, parameter in self._parameters():
            parameter.grad, key = None, f"gradient.{name}"
            chunks, values = saved, [gradients[name] for gradients in files if name in gradients]
            if values:
                mean = values[0] if len(files) == 1 else sum(values[1:], start=values[0]) / len(files)
                if not is_sharded(parameter):  # it may be sparse
                    parameter.grad = mean.to(parameter.device, copy=True)
                    continue
                chunks = Chunks.single_chunk({key: mean}, str(folder))
            if key in chunks:
                own = own_name(key, PartialState().num_processes)
                parameter.grad = torch.empty_like(parameter.detach())
                chunks.fill(own if own in chunks else key, parameter.grad)


def _object(name: str, value: Any) -> Piece:
    """Return a file of a state dict, with NumPy's numbers as Python's."""
    return Piece(
        name, "object", map_nested(lambda leaf: leaf.item() if isinstance(leaf, numpy.generic) else leaf, value)
    )


def _has_weights(folder: Path, saved: Chunks, index: int) -> bool:
    names = [numbered_name(name, index) for name in (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)]
    if index == 0:
        names += [SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME]
    return bool(saved.under(f"model.{index}.")) or any((folder / name).exists() for name in names)


def _loader_state(loader: Any) -> Any:
    return loader.own_state_dict() if hasattr(loader, "own_state_dict") else None


def _mismatch_error(name: str, item: Any, error: Exception) -> CheckpointError:
    detail = " ".join(str(error).split())
    return CheckpointError(f"{name} does not fit the {type(item).__name__} prepared in this run: {detail}")


def _load(item: Any, name: str, state: Any) -> None:
    try:
        item.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise _mismatch_error(name, item, error) from error


def _retie(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Add to ``state`` the tied names that it holds only under another name, as files by Accelerate do."""
    owners: dict[tuple[int, Any], str] = {}
    for name in expected:
        if name in state and fits_safetensors(expected[name]) and expected[name].numel():
            owners.setdefault((expected[name].data_ptr(), expected[name].shape), name)
    for name, value in expected.items():
        if name not in state and fits_safetensors(value) and (value.data_ptr(), value.shape) in owners:
            state[name] = state[owners[value.data_ptr(), value.shape]]
