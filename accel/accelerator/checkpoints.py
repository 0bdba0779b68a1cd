"""The part of `Accelerator` that saves and loads: checkpoints, weights, objects."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accel.accelerator.run import Part
from accel.checkpoint.all_ranks import call_roll, run_on_all_ranks
from accel.checkpoint.contents import CheckpointContents, Piece
from accel.checkpoint.durable import reporting_full_disk
from accel.checkpoint.file_names import CHECKPOINT_PREFIX, engine_name
from accel.checkpoint.manifest import Manifest
from accel.checkpoint.weights import is_writer, save, save_weights
from accel.checkpoint.writer import Checkpoints, logger
from accel.errors import ArgumentError, CheckpointError, one_of

_LOAD_OPTIONS = ("weights_only", "mmap", "encoding")


class CheckpointControl(Part):
    """Saving and loading of a run's state. All processes must call every method that touches a checkpoint."""

    def _init_checkpoints(self) -> None:
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._checkpoints = Checkpoints(self.state, self.project_configuration)

    @property
    def project_dir(self) -> str | None:
        """The directory of the run's files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The directory of the run's logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    @save_iteration.setter
    def save_iteration(self, number: int) -> None:
        self.project_configuration.iteration = number

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include the ``state_dict()`` of ``objects`` in checkpoints. Raises `ArgumentError` for one without it."""
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ArgumentError(
                    f"register_for_checkpointing: {type(item).__name__} has no state_dict and load_state_dict"
                )
        self._run.registered.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register ``hook(models, weights, output_dir)`` to run on every process before models are written.

        Files that it writes into ``output_dir`` become part of the checkpoint, and state dicts that it removes from
        the list ``weights`` are not written. The returned handle unregisters it.
        """
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Register ``hook(models, input_dir)`` to run before models are loaded.

        Models that it removes from the list are not loaded.
        """
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    def _contents(self, **kwargs: Any) -> CheckpointContents:
        return CheckpointContents(
            device=self.state.device,
            process_index=self.state.process_index,
            strategy=self.strategy,
            precision=self.precision,
            optimizers=self._run.optimizers,
            schedulers=self._run.schedulers,
            loaders=self._run.loaders,
            custom=self._run.registered,
            **kwargs,
        )

    @property
    def _can_be_saved(self) -> bool:
        """True unless an open accumulation window holds gradients that cannot be saved."""
        window = self._run.window
        return not window.is_open or self.strategy.can_save_window(window.state.plugin.sync_each_batch)

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        async_save: bool = False,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Save models, optimizers, schedulers, loader positions, scaler, generators and registered objects.

        Returns the directory: ``output_dir``, or the next one under ``project_dir/checkpoints`` if checkpoints are
        named automatically. A crash at any moment leaves either the old or the new checkpoint complete. On return the
        new one is on disk, with a checksum of every file. The script's own files in the directory are kept.

        With ``async_save`` it returns once the state is copied to host memory, which takes as much memory as the
        checkpoint is large, and writes in the background. The next save or load, `wait_for_checkpoint`,
        `end_training` and the interpreter's exit wait for the write.

        All processes must call it: if some have not 20 s after the main process, all that do raise `CollectiveError`
        with their ranks. Raises `ArgumentError` in an open accumulation window of a sharded model without
        ``sync_each_batch`` and of an engine (DeepSpeed, megatron-core), and for an engine with ``async_save``.

        Raises `CheckpointError`, on every process, if any process cannot write; the call that waits raises a
        background failure. ``save_model_func_kwargs`` have no effect and are named in a warning.
        """
        if not self._can_be_saved:
            raise ArgumentError(
                "save_state in an open accumulation window: a sharded model's gradients cannot be saved. Save where "
                "accelerator.sync_gradients is true"
                + ("" if self.strategy.is_engine else ", or pass GradientAccumulationPlugin(sync_each_batch=True)")
            )
        if async_save and any(map(self.strategy.saves, self._run.models)):
            raise ArgumentError(
                "save_state(async_save=True): DeepSpeed and megatron-core save their models themselves: leave "
                "async_save out"
            )
        automatic = output_dir is None
        if automatic and not self.project_configuration.automatic_checkpoint_naming:
            raise ArgumentError(
                "save_state() needs output_dir, or Accelerator(project_config="
                "ProjectConfiguration(automatic_checkpoint_naming=True), project_dir=…)"
            )
        if save_model_func_kwargs:
            logger.warning(f"save_state: {', '.join(sorted(save_model_func_kwargs))} ignored: no effect in this run")
        self._checkpoints.wait()
        path = self._checkpoints.next_path() if output_dir is None else Path(output_dir)
        weights: dict[int, dict[str, Any]] = {}
        self._checkpoints.save(
            path,
            lambda folder: self._run_save_hooks(weights, folder),
            lambda folder: self._save_engines(weights, folder),
            lambda: self._collect(weights, safe_serialization),
            background=async_save,
            prune=automatic,
        )
        self.project_configuration.iteration += automatic
        return str(path)

    def _run_save_hooks(self, weights: dict[int, dict[str, Any]], folder: Path) -> None:
        """Fill ``weights`` with the state dicts of the models by number that no hook removes."""
        models, in_shards = self._run.models, self.strategy.keeps_shards
        states = {
            number: self.strategy.model_state(model, full=not in_shards)
            for number, model in enumerate(models)
            if not self.strategy.saves(model)
        }
        remaining = list(states.values())
        for hook in self._save_model_state_pre_hook.values():
            hook(list(models), remaining, str(folder))
        numbers = {id(state): number for number, state in states.items()}
        weights.update({numbers.get(id(state), position): state for position, state in enumerate(remaining)})

    def _save_engines(self, weights: dict[int, dict[str, Any]], folder: Path) -> Manifest:
        """Save the engines into ``folder``; return the manifest of a checkpoint with ``weights``, without files."""
        for number, model in enumerate(self._run.models):
            if self.strategy.saves(model):
                self.strategy.save_engine(folder, engine_name(number))
        return self._contents(models=self._run.models).manifest(weights)

    def _collect(self, weights: dict[int, dict[str, Any]], safe: bool) -> list[Piece]:
        contents = self._contents(models=self._run.models, safe=safe)
        in_shards, writes, window = self.strategy.keeps_shards, self._checkpoints.is_writer, self._run.window
        chunks, optimizers = contents.chunks(
            weights, window.is_open, is_writer=writes, every_copy=self._checkpoints.on_each_node
        )
        if not in_shards:
            optimizers = {
                number: self.strategy.optimizer_state(item)
                for number, item in enumerate(self._run.optimizers)
                if not self.strategy.saves(item)
            }
        shared = contents.shared(weights, optimizers, in_chunks=in_shards) if writes else ()
        return [*chunks, *shared, *contents.rank_state(window.step, window.is_open)]

    def wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint being written in the background, if there is one.

        Raises `CheckpointError`, on every process, if it could not be written.
        """
        self._checkpoints.wait()

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        *,
        missing_ok: bool = False,
        **load_model_func_kwargs: Any,
    ) -> bool:
        """Load a checkpoint by `save_state` into the objects prepared and registered in this run, in the same order.

        Every file is verified, and compared with the run's objects, before any is loaded. Returns True; with
        ``missing_ok`` False if there is no checkpoint. Without ``input_dir``, or with ``"latest"``, the newest complete
        checkpoint under ``project_dir/checkpoints`` is loaded; a warning names damaged ones that were skipped.
        Checkpoints by Accelerate 1.15 are read too, with a warning that they have no checksums to verify.

        ``load_kwargs`` go to `torch.load` (``weights_only=False`` is refused), ``load_model_func_kwargs`` to
        `torch.nn.Module.load_state_dict`. ``map_location`` has no effect: tensors are read directly to the objects'
        devices. Raises `CheckpointError`, on every process.
        """
        newest = input_dir is None or os.fspath(input_dir) == "latest"
        if newest and self.project_dir is None:
            raise ArgumentError("load_state() without a directory needs Accelerator(project_dir=…)")
        options = _load_options(load_kwargs or {})
        _check_location(load_model_func_kwargs.pop("map_location", None))
        requested = None if newest or input_dir is None else Path(input_dir)
        folder = self._checkpoints.find(requested, missing_ok=missing_ok)
        if folder is None:
            return False
        contents = self._contents(models=self._run.models, options=options)
        run_hooks = self._run_load_hooks if self._load_model_state_pre_hook else None
        step = self._checkpoints.load(folder, contents, run_hooks, **load_model_func_kwargs)
        self._run.window.resume(step)
        prefix, _, number = folder.name.rpartition("_")
        if f"{prefix}_" == CHECKPOINT_PREFIX and number.isdecimal():
            self.save_iteration = int(number) + 1
        logger.info(f"loaded {folder}")
        return True

    def _run_load_hooks(self, folder: Path) -> list[int]:
        """Return the numbers of the models that the hooks have removed from the list of those to load."""
        models = list(self._run.models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(folder))
        return [number for number, model in enumerate(self._run.models) if all(model is not m for m in models)]

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a prepared model under its original names.

        ``unwrap=False``: under the names that a model which is not sharded has now, such as DDP's.
        """
        if unwrap or self.strategy.shards(model):
            return self.strategy.model_state(model)
        return dict(model.state_dict())

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write ``obj`` to the file ``f`` on the main process, or on one per node (``save_on_each_node``), atomically.

        ``safe_serialization`` writes a safetensors file from a dict of tensors. ``f`` may also be an open file.
        """
        save(self.strategy.on_host(obj), f, self.project_configuration.save_on_each_node, safe_serialization)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of ``model`` for inference or other programs, in files of at most ``max_shard_size``.

        The file is ``model.safetensors``, or if larger ``model-00001-of-0000N.safetensors`` and an index; without
        ``safe_serialization``, ``pytorch_model.bin`` likewise. Tied weights are written once. Weights that hooks
        offloaded to the CPU or the disk are loaded; sharded ones are gathered one at a time (safetensors).

        The main process alone may call it, unless the model is sharded: then all must, as `save_state`, and all raise
        if one fails. Raises `ArgumentError` for a directory that is a file, for weights on the meta device and for
        types that safetensors lacks; `CheckpointError` if the writer cannot write.
        """
        folder, sharded = Path(save_directory), self.strategy.shards(model)
        if sharded:
            call_roll("save_model")
        gathers_later = safe_serialization and sharded and not self.strategy.is_engine
        state = self.strategy.model_state(model, full=False) if gathers_later else self._full_state_dict(model)
        writes = is_writer(self.state, self.project_configuration.save_on_each_node)

        write = partial(save_weights, state, folder, max_shard_size, safe_serialization, writes)
        try:
            run_on_all_ranks(f"saving {folder}", reporting_full_disk()(write), alone=not sharded)
        except CheckpointError as error:
            if isinstance(error.__cause__, ArgumentError):  # raised by this process
                raise error.__cause__ from None
            raise

    def _full_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        unwrapped = self.strategy.unwrap(model)
        if any(hasattr(part, "_hf_hook") for part in unwrapped.modules()):
            from accel.big_models.load import get_state_dict_offloaded_model

            state: dict[str, Any] = get_state_dict_offloaded_model(unwrapped)
            return state
        if any(parameter.is_meta for parameter in unwrapped.parameters()):
            raise ArgumentError("save_model: some weights are on the meta device, where they have no values")
        return self.get_state_dict(model)


def _load_options(load_kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in load_kwargs:
        one_of(name, _LOAD_OPTIONS, source="load_state(load_kwargs=…)")
    if load_kwargs.get("weights_only") is False:
        raise ArgumentError("load_state(load_kwargs=…): weights_only=False would run code from the file: remove it")
    return {name: value for name, value in load_kwargs.items() if name == "encoding"}


def _check_location(location: Any) -> None:
    if location is not None:
        one_of(location, ("cpu", "on_device"), source="load_state(map_location=…)")
