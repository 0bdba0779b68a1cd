"""What a run keeps in a checkpoint, under which names (Accelerate's), and how it is put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accel.checkpoint.files import Digest, read_object, read_tensors, write_object, write_tensors
from accel.data.loader import DataLoaderShard
from accel.errors import CheckpointError
from accel.parallel.base import Strategy
from accel.precision.base import Precision
from accel.random import device_rng_state, host_rng_state, set_device_rng_state, set_host_rng_state

SAFE_WEIGHTS, WEIGHTS, EXTRA = "model.safetensors", "pytorch_model.bin", "model_extra.bin"
OPTIMIZER, SCHEDULER, SAMPLER, SCALER = "optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt"


def numbered_name(name: str, index: int) -> str:
    """``model.safetensors``, ``model_1.safetensors``, …"""
    if index == 0:
        return name
    stem, suffix = name.rsplit(".", 1)
    return f"{stem}_{index}.{suffix}"


def gradients_name(process_index: int) -> str:
    """The file of the gradients that a process had in the middle of an accumulation window."""
    return f"gradients_{process_index}.safetensors"


def random_states_name(process_index: int) -> str:
    """The file of a process's random number generators."""
    return f"random_states_{process_index}.pkl"


@dataclass(kw_only=True)
class Contents:
    """The objects of a run that a checkpoint holds, in the order in which they were prepared."""

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
    written: dict[str, Digest] = field(default_factory=dict)

    @property
    def stateful(self) -> Iterator[tuple[str, Any]]:
        """File name and object, of all that have a state dict but models and loaders."""
        for index, optimizer in enumerate(self.optimizers):
            yield numbered_name(OPTIMIZER, index), optimizer
        for index, scheduler in enumerate(self.schedulers):
            yield numbered_name(SCHEDULER, index), scheduler
        if self.precision.scaler is not None:
            yield SCALER, self.precision.scaler
        for index, item in enumerate(self.custom):
            yield f"custom_checkpoint_{index}.pkl", item

    @property
    def samplers(self) -> Iterator[tuple[str, DataLoaderShard]]:
        """File name and loader, of the loaders whose position is kept."""
        for index, loader in enumerate(self.loaders):
            if isinstance(loader, DataLoaderShard):
                yield numbered_name(SAMPLER, index), loader

    def write_shared(self, folder: Path, weights: Sequence[dict[str, Any]]) -> None:
        """Write what is the same on every process; ``weights`` are the state dicts of the models."""
        self.precision.settle()
        for index, state in enumerate(weights):
            self._write_weights(folder, index, state)
        for name, item in self.stateful:
            self.written[name] = write_object(folder / name, item.state_dict())
        for name, loader in self.samplers:
            self.written[name] = write_object(folder / name, loader.state_dict())

    def _write_weights(self, folder: Path, index: int, state: dict[str, Any]) -> None:
        if not self.safe:
            name = numbered_name(WEIGHTS, index)
            self.written[name] = write_object(folder / name, state)
            return
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        name = numbered_name(SAFE_WEIGHTS, index)
        self.written[name] = write_tensors(folder / name, tensors)
        extra = {key: value for key, value in state.items() if key not in tensors}
        if extra:
            name = numbered_name(EXTRA, index)
            self.written[name] = write_object(folder / name, extra)

    def write_own(self, folder: Path, step: int, window_open: bool) -> None:
        """Write what differs from process to process: its random number generators, and ``step`` of its window.

        In an open window, also the gradients accumulated in it, which no other process has.
        """
        if window_open:
            name = gradients_name(self.process_index)
            held = {key: p.grad for key, p in self._parameters() if p.grad is not None}
            self.written[name] = write_tensors(folder / name, held)
        name = random_states_name(self.process_index)
        states = {"step": step, **host_rng_state(), "device_rng": device_rng_state(self.device)}
        self.written[name] = write_object(folder / name, states)

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for index, model in enumerate(self.models):
            for name, parameter in self.strategy.unwrap(model).named_parameters():
                yield f"{index}.{name}", parameter

    def _read_gradients(self, folder: Path) -> None:
        path = folder / gradients_name(self.process_index)
        held = read_tensors(path) if path.exists() else {}
        for name, parameter in self._parameters():
            gradient = held.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)

    def read(self, folder: Path, **load_model_kwargs: Any) -> int | None:
        """Put everything back; returns the step of the accumulation window, ``None`` if this process has none on file.

        Raises `CheckpointError` naming the file that is missing or does not fit.
        """
        self.precision.settle()
        for index, model in enumerate(self.models):
            self._read_weights(folder, index, model, load_model_kwargs)
        for optimizer in self.optimizers:
            optimizer.state.clear()  # else there would be two at a time, and optimizers are most of the memory
        for name, item in self.stateful:
            _load(item, name, _read_file(folder, name))
        for name, loader in self.samplers:
            if (folder / name).exists():
                _load(loader, name, read_object(folder / name))
        self._read_gradients(folder)
        return self._read_own(folder)

    def _read_weights(self, folder: Path, index: int, model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        target = self.strategy.unwrap(model)
        safe, extra = folder / numbered_name(SAFE_WEIGHTS, index), folder / numbered_name(EXTRA, index)
        state = read_tensors(safe) if safe.exists() else dict(_read_file(folder, numbered_name(WEIGHTS, index)))
        if extra.exists():
            state.update(read_object(extra))
        wanted = target.state_dict()
        if state and all(name.startswith("module.") for name in state) and not set(state) & set(wanted):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        _retie(state, wanted)
        try:
            target.load_state_dict(state, **kwargs)
        except RuntimeError as error:
            detail = " ".join(str(error).split())
            raise CheckpointError(f"{folder}: model {index} does not fit: {detail}") from error

    def _read_own(self, folder: Path) -> int | None:
        path = folder / random_states_name(self.process_index)
        if not path.exists():
            return None
        states = read_object(path)
        set_host_rng_state(states)
        set_device_rng_state(self.device, states.get("device_rng"))
        step: int = states["step"]
        return step


def _read_file(folder: Path, name: str) -> Any:
    if not (folder / name).exists():
        raise CheckpointError(
            f"{folder} has no {name}: it was saved with fewer objects prepared, or by another program"
        )
    return read_object(folder / name)


def _load(item: Any, name: str, state: Any) -> None:
    try:
        item.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError) as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(
            f"{name} does not fit the {type(item).__name__} prepared in this run: {detail}"
        ) from error


def _retie(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Add to ``state`` the names of tied weights that it has under another name (as files by Accelerate do)."""
    owners: dict[tuple[int, Any], str] = {}
    for name in wanted:
        if name in state and isinstance(wanted[name], torch.Tensor) and wanted[name].numel():
            owners.setdefault((wanted[name].data_ptr(), wanted[name].shape), name)
    for name, value in wanted.items():
        if name not in state and isinstance(value, torch.Tensor) and (value.data_ptr(), value.shape) in owners:
            state[name] = state[owners[value.data_ptr(), value.shape]]
