"""The contents of a checkpoint: a run's objects, their files (named as Accelerate's), and how they are loaded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy
import torch

from accel.checkpoint.chunks import (
    Chunks,
    NameOf,
    chunks_to_write,
    names_of,
    plan_full_optimizer,
    plan_module,
    plan_optimizer,
    split_optimizer,
)
from accel.checkpoint.durable import Digest
from accel.checkpoint.file_names import (
    CUSTOM_NAME,
    EXTRA,
    OBJECT_NAMES,
    OPTIMIZER,
    OUTLINE,
    SAFE_WEIGHTS_NAME,
    SAMPLER,
    SCALER_NAME,
    SCHEDULER,
    WEIGHTS_NAME,
    chunks_name,
    custom_name,
    engine_name,
    gradients_name,
    numbered_name,
    random_states_name,
)
from accel.checkpoint.files import numpy_types, split_dense, write_safe_object, write_tensors
from accel.checkpoint.manifest import Layout, Manifest, read_manifest, unverified
from accel.checkpoint.weights import read_state_dict, read_weights
from accel.collectives.rng import device_rng_state, host_rng_state, set_device_rng_state, set_host_rng_state
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.parallel.base import Strategy
from accel.parallel.shares import count_versions, is_sharded, is_split
from accel.precision.base import Precision
from accel.pytree import map_nested
from accel.state import PartialState
from accel.tensor_files import read_all, read_object
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

    def manifest(self, weights: Iterable[int]) -> Manifest:
        """Return the manifest of a checkpoint, without its files. ``weights``: the numbers of the models it holds."""
        layout: Layout = "sharded" if self.strategy.keeps_shards else "whole"
        models: list[Layout] = ["engine" if self.strategy.saves(model) else "hook" for model in self.models]
        for index in weights:
            models[index] = layout
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
            tensors, extra = split_dense(state)
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
            tensors.update({f"{kind}.{index}.{key}": value for key, value in split_dense(own)[0].items()})
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

    @cached_property
    def name_of(self) -> NameOf:
        """The function that names a parameter: its model's number, and its name there."""
        return names_of(
            self.parameters(),
            "belongs to no prepared model, and a sharded checkpoint needs its name: prepare its model too",
        )

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of all models with their names."""
        for index, model in enumerate(self.models):
            for name, parameter in self.strategy.unwrap(model).named_parameters():
                yield f"{index}.{name}", parameter


def _object(name: str, value: Any) -> Piece:
    """Return a file of a state dict, with NumPy's numbers as Python's."""
    return Piece(name, map_nested(lambda leaf: leaf.item() if isinstance(leaf, numpy.generic) else leaf, value))


# Loading: all of a checkpoint is checked before anything of the run is changed.

Load = Callable[[], None]
_SUFFIXES = ("bin", "safetensors")  # of files of gradients; the second is an older accel's


class Loading:
    """A checkpoint that is about to be loaded into the objects of a run.

    Call `check`, `check_weights` for what that leaves, `load` and `load_random_states`, in this order. The first two
    raise `CheckpointError` for what is missing or does not fit, and change nothing. Only files that the manifest lists
    are opened; without one, all that are there.
    """

    manifest: Manifest

    def __init__(self, contents: CheckpointContents, folder: Path, **load_model_kwargs: Any) -> None:
        self._contents = contents
        self._folder = folder
        self._kwargs = load_model_kwargs
        self._objects: list[Load] = []  # those that load by code of their own
        self._engines: list[Load] = []
        self._tensors: list[Load] = []
        self._random_states: dict[str, Any] | None = None

    def check(self, weights: bool = True) -> bool:
        """Check everything, or all but ``weights``; return True if there are random states of this process."""
        self.manifest = read_manifest(self._folder) or unverified(self._folder)
        contents = self._contents
        contents.precision.finish_pending()
        contents.strategy.finish_pending()
        self._chunks = Chunks.in_folder(self._folder, self.manifest.files)
        if weights:
            self.check_weights()
        for name, item in contents.stateful:
            self._objects.append(_load_of(item, name, self._object(name)))
        for name, loader in contents.samplers:
            try:
                self._objects.append(_load_of(loader, name, self._object(name)))
            except CheckpointError as error:
                # Accelerate pickles the sampler itself, which cannot be read safely.
                logger.warning(f"{error}: this loader starts from the beginning")
        for index, optimizer in enumerate(contents.optimizers):
            if not contents.strategy.saves(optimizer):
                self._tensors.append(self._optimizer(index, optimizer))
        self._tensors.append(self._gradients())
        name = random_states_name(contents.process_index)
        if name in self.manifest.files:
            self._random_states = _read_random_states(self._folder / name)
        return self._random_states is not None

    def check_numbers(self) -> None:
        """Raise `CheckpointError` if the run has fewer registered objects than were saved, as Accelerate does.

        Fewer schedulers and loaders are only a warning.
        """
        names = {name for name, _ in (*self._contents.stateful, *self._contents.samplers)}
        unread = sorted(name for name in self.manifest.files if OBJECT_NAMES.fullmatch(name) and name not in names)
        if unread and unread[0].startswith(CUSTOM_NAME):
            raise CheckpointError(
                f"{self._folder} has {unread[0]}, but this run has no object for it: register as many as were saved "
                "(register_for_checkpointing)"
            )
        if unread:
            logger.warning(f"{self._folder}: {', '.join(unread)} not loaded: fewer schedulers or loaders are prepared")

    def check_weights(self, hooked: Collection[int] = ()) -> None:
        """Check the weights. ``hooked``: the numbers of the models that a hook of the script has loaded."""
        for index, number in self._weight_numbers(hooked).items():
            model, strategy = self._contents.models[index], self._contents.strategy
            if not strategy.saves(model):
                self._tensors += self._weights(number, strategy.unwrap(model))
                continue
            name = engine_name(number)
            if not any(file.startswith(f"{name}/") for file in self.manifest.files):
                raise CheckpointError(
                    f"{self._folder}: model {number} was not saved by DeepSpeed or megatron-core: load it without "
                    "deepspeed_plugin or megatron_lm_plugin"
                )
            self._engines.append(partial(strategy.load_engine, self._folder, name, self.manifest.num_processes))

    @property
    def _engine(self) -> str:
        """The engine of a checkpoint, and how to load it; DeepSpeed leaves a script that gathers the weights."""
        if any(name.endswith("/common.pt") for name in self.manifest.files):
            return "megatron-core: pass megatron_lm_plugin"
        script, folder = "zero_to_fp32.py", self._folder
        has_script = script in self.manifest.files
        gathering = f", or gather the weights: python {folder / script} {folder} OUT" if has_script else ""
        return f"DeepSpeed: pass deepspeed_plugin{gathering}"

    def load(self, together: Callable[[Load], object]) -> None:
        """Load objects by code of their own, then engines, by collectives, then all else, each by ``together``.

        If that raises on all processes what one raises, an error of an object leaves all else on all as it was.
        """
        for loads in (self._objects, self._engines, self._tensors):
            together(partial(_run_all, loads))

    def load_random_states(self) -> int | None:
        """Load them; return the step of the accumulation window, ``None`` if this process saved none."""
        if self._random_states is None:
            return None
        states = self._random_states
        for (_, loader), state in zip(self._contents.samplers, states.get("loaders", ()), strict=False):
            if state is not None and hasattr(loader, "load_own_state_dict"):
                loader.load_own_state_dict(state)
        with _fitting(random_states_name(self._contents.process_index), torch.default_generator):
            set_host_rng_state(states)
            set_device_rng_state(self._contents.device, _of_device(states, self._contents.device))
        return int(states["step"])

    def _object(self, name: str, **kwargs: Any) -> Any:
        if name not in self.manifest.files:
            raise CheckpointError(
                f"{self._folder} has no {name}: it was saved with fewer objects prepared, or by another program"
            )
        return read_object(self._folder / name, **kwargs, **(self._contents.options or {}))

    def _optimizer(self, index: int, optimizer: Any) -> Load:
        sharded = index < len(self.manifest.optimizers) and self.manifest.optimizers[index] == "sharded"
        name = numbered_name(OUTLINE if sharded else OPTIMIZER, index)
        state = self._object(name, stored=not sharded)
        with _fitting(name, optimizer):
            if sharded:
                load = plan_optimizer(optimizer, self._contents.name_of, state, self._chunks, f"optimizer.{index}.")
            else:
                load = plan_full_optimizer(optimizer, state, self._folder / name)
        return _fitting(name, optimizer)(load)

    def _weight_numbers(self, hooked: Collection[int]) -> dict[int, int]:
        """Map the models to load to the numbers of their weights.

        Accelerate, and older versions of accel, number only the models that no hook has taken.
        """
        loaded = [index for index in range(len(self._contents.models)) if index not in hooked]
        stated = self.manifest.states_layouts
        return {index: index if stated else position for position, index in enumerate(loaded)}

    def _layout(self, number: int) -> str | None:
        if number < len(self.manifest.models):
            return self.manifest.models[number]
        return "sharded" if self._chunks.under(f"model.{number}.") else None

    def _weights(self, number: int, target: torch.nn.Module) -> Iterator[Load]:
        layout, extra_name = self._layout(number), numbered_name(EXTRA, number)
        if layout == "engine":
            raise CheckpointError(f"{self._folder}: model {number} was saved by {self._engine}")
        extra = read_object(self._folder / extra_name) if extra_name in self.manifest.files else {}
        if layout == "hook":
            raise CheckpointError(
                f"{self._folder}: the weights of model {number} were saved by a hook of the script, and no hook of "
                "this run loads them (register_load_state_pre_hook)"
            )
        if layout == "sharded" or (layout is None and not target.state_dict()):
            yield plan_module(target, self._chunks, extra, f"model.{number}.", **self._kwargs)
            return
        state = {**read_weights(self._folder, number, self.manifest.files), **extra}
        if all(name.startswith("module.") for name in state) and not set(state) & set(target.state_dict()):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        label = f"{self._folder}: model {number}"
        saved, rest = Chunks.of_state(state, f"{label} does not fit")
        load = plan_module(target, saved, rest, by_module=not is_split(target), **self._kwargs)
        yield _fitting(label, target)(load)
        for name, buffer in target.named_buffers():
            key = self._chunks.own(f"buffer.{number}.{name}")
            if key is not None:
                yield self._chunks.plan(key, buffer)

    def _gradients(self) -> Load:
        """Check the gradients of an open window: this process's own or, in another world, the mean of all."""
        names = [gradients_name(rank, suffix) for rank in range(self.manifest.num_processes) for suffix in _SUFFIXES]
        files = [read_state_dict(self._folder / name) for name in names if name in self.manifest.files]
        if len(files) == PartialState().num_processes:
            files = [files[self._contents.process_index]]

        def load() -> None:
            self._contents.strategy.drop_held_gradients()
            for name, parameter in self._contents.parameters():
                values = [gradients[name] for gradients in files if name in gradients]
                parameter.grad = self._gradient(f"gradient.{name}", parameter, values, len(files))

        return load

    def _gradient(self, key: str, parameter: torch.Tensor, values: list[Any], count: int) -> torch.Tensor | None:
        chunks = self._chunks
        if values:
            mean: torch.Tensor = sum(map(read_all, values[1:]), start=read_all(values[0]))
            mean = mean / count if count > 1 else mean
            if not is_sharded(parameter):  # it may be sparse
                return mean.to(parameter.device)
            chunks = Chunks.single_chunk({key: mean}, str(self._folder))
        own = chunks.own(key)
        if own is None:
            return None
        gradient = torch.empty_like(parameter.detach())
        chunks.fill(own, gradient)
        return gradient


def _run_all(loads: list[Load]) -> None:
    pending = list(loads)
    loads.clear()  # they refer to the list's owner: a cycle would keep the run's objects
    for load in pending:
        load()


@contextmanager
def _fitting(name: str, item: Any) -> Iterator[None]:
    """Raise `CheckpointError` with ``name`` for an error of ``item`` about its saved state."""
    try:
        yield
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        detail = " ".join(str(error).split())
        raise CheckpointError(
            f"{name} does not fit the {type(item).__name__} prepared in this run: {detail}"
        ) from error


def _load_of(item: Any, name: str, state: Any) -> Load:
    return _fitting(name, item)(partial(item.load_state_dict, state))


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


def _read_random_states(path: Path) -> dict[str, Any]:
    """Return the content of a file of random states, always with ``step``. Accelerate's holds NumPy arrays."""
    states = read_object(path, allowed=numpy_types())
    if not isinstance(states, dict) or not {"torch_manual_seed", "random_state"} <= states.keys():
        raise CheckpointError(f"{path} cannot be loaded: it has no states of generators")
    return {"step": 0, **states}


def _of_device(states: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    device_states = states.get(DEVICE_STATES.format(device.type))
    if device_states is None:
        return states.get("device_rng")
    index = device.index or 0
    state: torch.Tensor | None = device_states[index] if index < len(device_states) else None
    return state
