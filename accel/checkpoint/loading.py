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
from accel.checkpoint.contents import DEVICE_STATES, CheckpointContents
from accel.checkpoint.file_names import (
    CUSTOM_NAME,
    EXTRA,
    OBJECT_NAMES,
    OPTIMIZER,
    OUTLINE,
    engine_name,
    gradients_name,
    numbered_name,
    random_states_name,
)
from accel.checkpoint.files import fits_safetensors, numpy_types
from accel.checkpoint.manifest import Manifest, read_manifest, unverified
from accel.checkpoint.weights import read_weights
from accel.collectives.rng import set_device_rng_state, set_host_rng_state
from accel.errors import CheckpointError
from accel.logging import get_logger
from accel.parallel.shares import is_sharded, is_split
from accel.state import PartialState
from accel.tensor_files import SafetensorsFile, read_all, read_object

logger = get_logger(__name__)

Load = Callable[[], None]


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
        if self.manifest.states_layouts:
            return {index: index for index in loaded}
        unwrap = self._contents.strategy.unwrap
        with_weights = [index for index in loaded if unwrap(self._contents.models[index]).state_dict()]
        same = all(self._layout(index) != "none" for index in with_weights)
        return {index: index if same else position for position, index in enumerate(loaded)}

    def _layout(self, number: int) -> str:
        if number < len(self.manifest.models):
            return self.manifest.models[number]
        return "sharded" if self._chunks.under(f"model.{number}.") else "none"

    def _weights(self, number: int, target: nn.Module) -> Iterator[Load]:
        layout, extra_name = self._layout(number), numbered_name(EXTRA, number)
        if layout == "engine":
            raise CheckpointError(f"{self._folder}: model {number} was saved by {self._engine}")
        extra = read_object(self._folder / extra_name) if extra_name in self.manifest.files else {}
        if layout == "hook":
            raise CheckpointError(
                f"{self._folder}: the weights of model {number} were saved by a hook of the script, and no hook of "
                "this run loads them (register_load_state_pre_hook)"
            )
        if layout == "sharded" or (layout == "none" and not target.state_dict()):
            yield plan_module(target, self._chunks, f"model.{number}.", extra, **self._kwargs)
            return
        state = {**read_weights(self._folder, number, self.manifest.files), **extra}
        if all(name.startswith("module.") for name in state) and not set(state) & set(target.state_dict()):
            state = {name.removeprefix("module."): value for name, value in state.items()}
        tensors = {name: value for name, value in state.items() if fits_safetensors(value)}
        rest = {name: value for name, value in state.items() if name not in tensors}
        label = f"{self._folder}: model {number}"
        saved = Chunks.single_chunk(tensors, f"{label} does not fit")
        load = plan_module(target, saved, "", rest, by_module=not is_split(target), **self._kwargs)
        yield _fitting(label, target)(load)
        for name, buffer in target.named_buffers():
            key = own_name(f"buffer.{number}.{name}", PartialState().num_processes)
            if key in self._chunks:
                yield self._chunks.plan(key, buffer)

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


def _read_random_states(path: Path) -> dict[str, Any]:
    """Return the content of a file of random states, always with ``step``. Raises `CheckpointError` if it is damaged.

    Reads Accelerate's file too, which holds NumPy arrays.
    """
    states: dict[str, Any] = read_object(path, allowed=numpy_types())
    try:
        missing = {"torch_manual_seed", "random_state"} - states.keys()
        if missing:
            raise ValueError(f"it has no {min(missing)}")
        return {**states, "step": int(states.get("step", 0))}
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error


def _of_device(states: dict[str, Any], device: torch.device) -> torch.Tensor | None:
    device_states = states.get(DEVICE_STATES.format(device.type))
    if device_states is None:
        return states.get("device_rng")
    index = device.index or 0
    state: torch.Tensor | None = device_states[index] if index < len(device_states) else None
    return state
