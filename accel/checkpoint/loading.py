"""The loading of a checkpoint: all of it is checked before anything of the run is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel.checkpoint.chunks import Chunks, own_name, plan_full_optimizer, plan_module, plan_optimizer
from accel.checkpoint.contents import CheckpointContents
from accel.checkpoint.file_names import (
    EXTRA,
    OPTIMIZER,
    OUTLINE,
    engine_name,
    gradients_name,
    numbered_name,
    random_states_name,
)
from accel.checkpoint.manifest import Manifest, read_manifest, unverified
from accel.checkpoint.tensors import fits_safetensors, load_module
from accel.checkpoint.torch_files import read_random_states, set_random_states
from accel.checkpoint.weights import read_weights
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.parallel.shares import is_sharded
from accel.state import PartialState
from accel.tensor_files import SafetensorsFile, read_all, read_object

logger = get_logger(__name__)

Load = Callable[[], None]


class Loading:
    """A checkpoint that is about to be loaded into the objects of a run.

    Call `check`, `check_weights` for what that leaves, and `load`, in this order. The first two raise `CheckpointError`
    for what is missing or does not fit, and change nothing. Only files that the manifest lists are opened; without one,
    all that are there.
    """

    manifest: Manifest

    def __init__(self, contents: CheckpointContents, folder: Path, **load_model_kwargs: Any) -> None:
        self._contents = contents
        self._folder = folder
        self._kwargs = load_model_kwargs
        self._objects: list[Load] = []  # those that load by code of their own
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
            self._random_states = read_random_states(self._folder / name)
        return self._random_states is not None

    def check_weights(self, hooked: Collection[int] = ()) -> None:
        """Check the weights. ``hooked``: the numbers of the models that a hook of the script has loaded."""
        for index, number in self._weight_numbers(hooked).items():
            model, strategy = self._contents.models[index], self._contents.strategy
            if strategy.saves(model):
                self._check_engine(number)
                self._tensors.append(
                    partial(strategy.load_engine, self._folder, engine_name(number), self.manifest.num_processes)
                )
            else:
                self._tensors += self._weights(number, strategy.unwrap(model))

    def _check_engine(self, number: int) -> None:
        """Raise `CheckpointError` if model ``number`` was not saved by an engine."""
        if not any(name.startswith(f"{engine_name(number)}/") for name in self.manifest.files):
            raise CheckpointError(
                f"{self._folder}: model {number} was not saved by DeepSpeed or megatron-core: load it without "
                "deepspeed_plugin or megatron_lm_plugin"
            )

    @property
    def _engine(self) -> str:
        """The engine of a checkpoint, and the argument to load it with."""
        by_megatron = any(name.endswith("/common.pt") for name in self.manifest.files)
        return "megatron-core: pass megatron_lm_plugin" if by_megatron else "DeepSpeed: pass deepspeed_plugin"

    @property
    def _gathers(self) -> str:
        """The command that gathers the weights of DeepSpeed's files, if its script is there."""
        script, folder = "zero_to_fp32.py", self._folder
        return (
            f", or gather the weights: python {folder / script} {folder} OUT" if script in self.manifest.files else ""
        )

    def load(self) -> int | None:
        """Load what was checked; return the step of the accumulation window, ``None`` if this process saved none.

        An error of an object that loads by code of its own leaves weights, optimizers and generators as they are.
        """
        loads = [*self._objects, *self._tensors]
        self._objects.clear()  # they refer to this object: a cycle would keep the run's objects
        self._tensors.clear()
        for load in loads:
            load()
        if self._random_states is None:
            return None
        states = self._random_states
        for (_, loader), state in zip(self._contents.samplers, states.get("loaders", ()), strict=False):
            if state is not None and hasattr(loader, "load_own_state_dict"):
                loader.load_own_state_dict(state)
        set_random_states(states, self._contents.device)
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
        if self.manifest.states_layouts:
            return {index: index for index in loaded}
        unwrap = self._contents.strategy.unwrap
        with_weights = [index for index in loaded if unwrap(self._contents.models[index]).state_dict()]
        same = all(self._layout(index) != "none" for index in with_weights)
        return {index: index if same else position for position, index in enumerate(loaded)}

    def _layout(self, number: int) -> str:
        if self.manifest.models is None:
            return "sharded" if self._chunks.under(f"model.{number}.") else "none"
        return self.manifest.models[number] if number < len(self.manifest.models) else "none"

    def _weights(self, number: int, target: nn.Module) -> Iterator[Load]:
        layout, name = self._layout(number), numbered_name(EXTRA, number)
        if layout == "engine":
            raise CheckpointError(f"{self._folder}: model {number} was saved by {self._engine}{self._gathers}")
        extra = read_object(self._folder / name) if name in self.manifest.files else {}
        strict = self._kwargs.get("strict", True)
        if layout == "hook":
            raise CheckpointError(
                f"{self._folder}: the weights of model {number} were saved by a hook of the script, and no hook of "
                "this run loads them (register_load_state_pre_hook)"
            )
        if layout == "sharded" or (layout == "none" and not target.state_dict()):
            yield plan_module(target, self._chunks, f"model.{number}.", extra, strict)
            return
        state = read_weights(self._folder, number, self.manifest.files)
        if any(is_sharded(parameter) for parameter in target.parameters()):
            yield plan_module(target, Chunks.single_chunk(state, str(self._folder)), "", extra, strict)
        else:
            yield self._whole(number, target, {**state, **extra})
        for buffer_name, buffer in target.named_buffers():
            key = own_name(f"buffer.{number}.{buffer_name}", PartialState().num_processes)
            if key in self._chunks:
                yield self._chunks.plan(key, buffer)

    def _whole(self, number: int, target: nn.Module, state: dict[str, Any]) -> Load:
        expected = target.state_dict()
        if state and all(name.startswith("module.") for name in state) and not set(state) & set(expected):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        _retie(state, expected)
        problem = _mismatch(target, state, expected, strict=self._kwargs.get("strict", True))
        if problem is not None:
            raise CheckpointError(f"{self._folder}: model {number} does not fit: {problem}")

        def load() -> None:
            try:
                load_module(target, state, **self._kwargs)
            except RuntimeError as error:
                detail = " ".join(str(error).split())
                raise CheckpointError(f"{self._folder}: model {number} does not fit: {detail}") from error

        return load

    def _gradients(self) -> Load:
        """Check the gradients of an open window: this process's own or, in another world, the mean of all."""
        files = [
            read_object(self._folder / name, stored=True)
            if name.endswith(".bin")
            else SafetensorsFile(self._folder / name).tensors
            for rank in range(self.manifest.num_processes)
            for name in (gradients_name(rank, "bin"), gradients_name(rank, "safetensors"))
            if name in self.manifest.files
        ]
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
        if key not in chunks:
            return None
        own = own_name(key, PartialState().num_processes)
        gradient = torch.empty_like(parameter.detach())
        chunks.fill(own if own in chunks else key, gradient)
        return gradient


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


def _mismatch(module: nn.Module, state: dict[str, Any], expected: dict[str, Any], *, strict: bool) -> str | None:
    """Return how ``state`` differs from the state dict ``expected`` of ``module``, or None.

    Parts of the module that load by code of their own are not compared.
    """
    own = [f"{name}." if name else "" for name, part in module.named_modules() if _loads_by_own_code(part)]

    def compared(names: Collection[str]) -> list[str]:
        return [name for name in names if not name.startswith(tuple(own))] if own else list(names)

    lacking = compared(expected.keys() - state.keys())
    unknown = compared(state.keys() - expected.keys())
    if strict and (lacking or unknown):
        return f"it lacks {min(lacking)}" if lacking else f"this run has no {min(unknown)}"
    for name in compared([name for name in expected if name in state]):
        saved, present = (getattr(value, "shape", None) for value in (state[name], expected[name]))
        if saved != present:
            return f"{name} has shape {tuple(saved or ())}, but {tuple(present or ())} in this run"
    return None


def _loads_by_own_code(part: nn.Module) -> bool:
    kind = type(part)
    overridden = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    return overridden or kind.load_state_dict is not nn.Module.load_state_dict or bool(part._load_state_dict_pre_hooks)


def _retie(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Add to ``state`` the tied names that it holds only under another name, as files by Accelerate do."""
    owners: dict[tuple[int, Any], str] = {}
    for name in expected:
        if name in state and fits_safetensors(expected[name]) and expected[name].numel():
            owners.setdefault((expected[name].data_ptr(), expected[name].shape), name)
    for name, value in expected.items():
        if name not in state and fits_safetensors(value) and (value.data_ptr(), value.shape) in owners:
            state[name] = state[owners[value.data_ptr(), value.shape]]
