"""The contents of a checkpoint: a run's objects, their files (named as Accelerate's), and how they are loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch

from accel.checkpoint.chunks import chunks_to_write, split_optimizer
from accel.checkpoint.durable import Digest
from accel.checkpoint.file_names import (
    EXTRA,
    OPTIMIZER,
    OUTLINE,
    SAFE_WEIGHTS_NAME,
    SAMPLER,
    SCALER_NAME,
    SCHEDULER,
    WEIGHTS_NAME,
    chunks_name,
    custom_name,
    gradients_name,
    numbered_name,
    random_states_name,
)
from accel.checkpoint.manifest import Layout
from accel.checkpoint.tensors import fits_safetensors, write_tensors
from accel.checkpoint.torch_files import random_states, write_safe_object
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.parallel.base import Strategy
from accel.parallel.shares import count_versions, is_sharded
from accel.precision.base import Precision
from accel.pytree import map_nested
from accel.world.environment import read_int

logger = get_logger(__name__)


@dataclass(frozen=True)
class Piece:
    """One file of a checkpoint and its content: tensors by name for safetensors, otherwise any object."""

    name: str
    value: Any
    metadata: dict[str, str] | None = None  # of safetensors

    def write(self, folder: Path) -> Digest:
        """Write the file in ``folder`` and flush it to the disk."""
        path = folder / self.name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            return write_tensors(path, self.value, self.metadata)
        return write_safe_object(path, self.value)


@dataclass(kw_only=True)
class CheckpointContents:
    """The objects of a run that a checkpoint holds, in the order of `prepare`. ``options``: options of `torch.load`."""

    device: torch.device
    process_index: int
    strategy: Strategy
    precision: Precision
    models: Sequence[torch.nn.Module] = ()
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

    def layouts(self, weights: Mapping[int, dict[str, Any]]) -> tuple[list[Layout], list[Layout]]:
        """Return the layouts of the models and optimizers, as `Manifest` has them. ``weights``: see `shared`."""
        layout: Layout = "sharded" if self.strategy.keeps_shards else "whole"
        models: list[Layout] = ["engine" if self.strategy.saves(model) else "hook" for model in self.models]
        for index, state in weights.items():
            in_file = layout == "whole" or any(map(fits_safetensors, state.values()))
            models[index] = layout if in_file else "none"
        return models, ["engine" if self.strategy.saves(item) else layout for item in self.optimizers]

    def shared(self, weights: Mapping[int, dict[str, Any]], states: Mapping[int, dict[str, Any]]) -> Iterator[Piece]:
        """Yield the files that are the same on every process.

        ``weights``: the state dicts of the models, by number, without those that a hook or an engine saves.
        ``states``: the state dicts of the optimizers, likewise.
        """
        self.precision.finish_pending()
        for index, state in weights.items():
            yield from self._weights(index, state)
        for index, state in states.items():
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
            tensors.update({f"gradient.{name}": p.grad for name, p in self.parameters() if p.grad is not None})
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
            outline, state = split_optimizer(optimizer, self.name_of)
            tensors.update({f"optimizer.{index}.{path}": value for path, value in state.items()})
            versions.update({f"optimizer.{index}.{path}": number for path, number in outline["versions"].items()})
            common.append(_object(numbered_name(OUTLINE, index), outline))
        if tensors:
            parts, table = chunks_to_write(tensors, versions, is_writer=is_writer, every_copy=every_copy)
            node = read_int(os.environ, "GROUP_RANK", minimum=0) or 0
            yield Piece(chunks_name(node, self.process_index), parts, table)
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
        return any(is_sharded(parameter) for _, parameter in self.parameters())

    @cached_property
    def _names_by_id(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.parameters()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter of a prepared model: its model's number, and its name there."""
        if id(parameter) not in self._names_by_id:
            raise CheckpointError(
                f"an optimizer has a parameter of shape {tuple(parameter.shape)} that belongs to no prepared model, "
                "and a sharded checkpoint needs its name: prepare its model too"
            )
        return self._names_by_id[id(parameter)]

    def _weights(self, index: int, state: dict[str, Any]) -> Iterator[Piece]:
        if not self.safe:
            yield Piece(numbered_name(WEIGHTS_NAME, index), state)
            return
        tensors = {key: value for key, value in state.items() if fits_safetensors(value)}
        yield Piece(numbered_name(SAFE_WEIGHTS_NAME, index), tensors)
        yield from self._extra(index, state)

    def _extra(self, index: int, state: dict[str, Any]) -> Iterator[Piece]:
        """Yield the file of what safetensors cannot hold: extra state, sparse buffers."""
        extra = {key: value for key, value in state.items() if not fits_safetensors(value)}
        if extra:
            yield Piece(numbered_name(EXTRA, index), extra)

    def rank_state(self, step: int, window_open: bool) -> Iterator[Piece]:
        """Yield the files of this process alone: its generators, its loaders' own state, and ``step`` of its window.

        In an open window, also its accumulated gradients, which no other process has.
        """
        if window_open and not self._is_sharded:
            gradients = {key: p.grad for key, p in self.parameters() if p.grad is not None}
            yield Piece(gradients_name(self.process_index), self.strategy.on_host(gradients))
        states = random_states(step, self.device)
        loaders = [getattr(loader, "own_state_dict", lambda: None)() for _, loader in self.samplers]
        if any(state is not None for state in loaders):
            states["loaders"] = loaders
        yield Piece(random_states_name(self.process_index), states)

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of all models with their names."""
        for index, model in enumerate(self.models):
            for name, parameter in self.strategy.unwrap(model).named_parameters():
                yield f"{index}.{name}", parameter


def _object(name: str, value: Any) -> Piece:
    """Return a file of a state dict, with NumPy's numbers as Python's."""
    return Piece(name, map_nested(lambda leaf: leaf.item() if isinstance(leaf, numpy.generic) else leaf, value))
