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
from accel.checkpoint.files import fits_safetensors, write_safe_object, write_tensors
from accel.checkpoint.manifest import Layout, Manifest
from accel.collectives.rng import device_rng_state, host_rng_state
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

    def manifest(self, weights: Mapping[int, dict[str, Any]]) -> Manifest:
        """Return the manifest of a checkpoint, without its files. ``weights``: see `shared`."""
        layout: Layout = "sharded" if self.strategy.keeps_shards else "whole"
        models: list[Layout] = ["engine" if self.strategy.saves(model) else "hook" for model in self.models]
        for index, state in weights.items():
            in_file = layout == "whole" or any(map(fits_safetensors, state.values()))
            models[index] = layout if in_file else "none"
        optimizers: list[Layout] = ["engine" if self.strategy.saves(item) else layout for item in self.optimizers]
        return Manifest(num_processes=self.strategy.state.num_processes, models=models, optimizers=optimizers)

    def shared(
        self, weights: Mapping[int, dict[str, Any]], optimizers: Mapping[int, Any], *, in_chunks: bool = False
    ) -> Iterator[Piece]:
        """Yield the files that are the same on every process.

        ``weights``: the state dicts of the models, by number, without those that a hook or an engine saves.
        ``optimizers``: the state dicts of the optimizers, likewise; with ``in_chunks``, where `chunks` has all tensors
        that it can, their outlines.
        """
        for index, state in weights.items():
            if not self.safe and not in_chunks:
                yield Piece(numbered_name(WEIGHTS_NAME, index), state)
                continue
            tensors = {key: value for key, value in state.items() if fits_safetensors(value)}
            extra = {key: value for key, value in state.items() if key not in tensors}  # such as sparse buffers
            if not in_chunks:
                yield Piece(numbered_name(SAFE_WEIGHTS_NAME, index), tensors)
            if extra:
                yield Piece(numbered_name(EXTRA, index), extra)
        for index, state in optimizers.items():
            yield _object(numbered_name(OUTLINE if in_chunks else OPTIMIZER, index), state)
        for name, item in (*self.stateful, *self.samplers):
            yield _object(name, item.state_dict())

    def chunks(
        self, weights: Mapping[int, dict[str, Any]], window_open: bool, *, is_writer: bool, every_copy: bool
    ) -> tuple[list[Piece], dict[int, dict[str, Any]]]:
        """Return this process's file of chunks, if it has any, and the outlines of optimizers whose tensors they hold.

        If checkpoints hold full models, the chunks are only gradients of an open window, and buffers that differ
        between processes. Collective: all processes must call it.

        ``weights``: see `shared`.
        ``is_writer``, ``every_copy``: see `chunks_to_write`.
        """
        self.precision.finish_pending()
        in_shards = self.strategy.keeps_shards
        tensors: dict[str, torch.Tensor] = {}
        outlines: dict[int, dict[str, Any]] = {}
        if window_open and self._is_sharded:
            tensors.update({f"gradient.{name}": p.grad for name, p in self.parameters() if p.grad is not None})
        for index, state in weights.items():
            own, kind = (state, "model") if in_shards else (self._own_buffers(index), "buffer")
            tensors.update({f"{kind}.{index}.{key}": value for key, value in own.items() if fits_safetensors(value)})
        versions = count_versions(tensors) if self._is_sharded or self.strategy.own_buffers else {}
        if not in_shards:
            tensors = {n: value for n, value in tensors.items() if n.startswith("gradient.") or versions[n] > 1}
        for index, optimizer in enumerate(self.optimizers if in_shards else ()):
            outlines[index], state = split_optimizer(optimizer, self.name_of)
            tensors.update({f"optimizer.{index}.{path}": value for path, value in state.items()})
            counts = outlines[index]["versions"]
            versions.update({f"optimizer.{index}.{path}": number for path, number in counts.items()})
        if not tensors:
            return [], outlines
        parts, table = chunks_to_write(tensors, versions, is_writer=is_writer, every_copy=every_copy)
        node = read_int(os.environ, "GROUP_RANK", minimum=0) or 0
        return [Piece(chunks_name(node, self.process_index), parts, table)], outlines

    def _own_buffers(self, index: int) -> dict[str, torch.Tensor]:
        """Return the saved buffers of a model if processes do not keep them equal."""
        if not self.strategy.own_buffers:
            return {}
        model = self.strategy.unwrap(self.models[index])
        saved = model.state_dict()
        return {name: value for name, value in model.named_buffers() if name in saved}

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

    def rank_state(self, step: int, window_open: bool) -> Iterator[Piece]:
        """Yield the files of this process alone: its generators, its loaders' own state, and ``step`` of its window.

        In an open window, also its accumulated gradients, which no other process has.
        """
        if window_open and not self._is_sharded:
            gradients = {key: p.grad for key, p in self.parameters() if p.grad is not None}
            yield Piece(gradients_name(self.process_index), self.strategy.on_host(gradients))
        states = _random_states(step, self.device)
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


# The states of a process's random number generators, in Accelerate's form, in types that are safe to read.

DEVICE_STATES = "torch_{}_manual_seed"  # the key of those of all devices of a type


def _random_states(step: int, device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's, torch's and the device's generators, and ``step``."""
    states = {"step": step, **host_rng_state()}
    if device.type in ("cuda", "xpu"):
        states[DEVICE_STATES.format(device.type)] = getattr(torch, device.type).get_rng_state_all()
    else:
        states["device_rng"] = device_rng_state(device)
    return states
