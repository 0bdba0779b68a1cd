"""The part of `Accelerator` that is about what is kept on disk."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from accel.checkpoint.contents import Contents
from accel.checkpoint.files import Digest, write_object, write_tensors
from accel.checkpoint.writer import Checkpoints, logger
from accel.errors import ArgumentError
from accel.parallel.base import Strategy
from accel.plugins import ProjectConfiguration
from accel.precision.base import Precision
from accel.state import AcceleratorState
from accel.stepping import Window


class CheckpointControl:
    """Saving and loading the state of a run; every method that touches a checkpoint is called by all processes."""

    state: AcceleratorState
    strategy: Strategy
    precision: Precision
    project_configuration: ProjectConfiguration
    _window: Window
    _models: list[torch.nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]

    def _init_checkpoints(self) -> None:
        self._save_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._load_model_state_pre_hook: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self._checkpoints = Checkpoints(self.state, self.project_configuration)

    @property
    def project_dir(self) -> str | None:
        """Where the run keeps its files."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where the run keeps its logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next automatically named checkpoint."""
        return self.project_configuration.iteration

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Keep the ``state_dict()`` of ``objects`` in checkpoints; raises `ArgumentError` for one that has none."""
        for item in objects:
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise ArgumentError(
                    f"register_for_checkpointing: {type(item).__name__} has no state_dict and load_state_dict"
                )
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have ``hook(models, weights, directory)`` called before models are written.

        It may write files into ``directory``, which become part of the checkpoint, and take state dicts out of the list
        ``weights``, which are then not written. The handle that is returned removes it.
        """
        handle = RemovableHandle(self._save_model_state_pre_hook)
        self._save_model_state_pre_hook[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have ``hook(models, directory)`` called before models are loaded; models it takes out of the list are not."""
        handle = RemovableHandle(self._load_model_state_pre_hook)
        self._load_model_state_pre_hook[handle.id] = hook
        return handle

    def _contents(self, **how: Any) -> Contents:
        return Contents(
            device=self.state.device,
            process_index=self.state.process_index,
            strategy=self.strategy,
            precision=self.precision,
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            custom=self._custom_objects,
            **how,
        )

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True) -> str:
        """Write models, optimizers, schedulers, loaders' positions, scaler, generators and registered objects.

        Returns the directory, ``output_dir``, or without it the next one under ``project_dir/checkpoints`` if
        checkpoints are named automatically. The directory is at every moment whole: what it was before, or what it is
        when this returns, on disk and with a digest of every file. Files in it that are the script's own are kept.
        Raises `CheckpointError`, on every process, if any process cannot write.
        """
        automatic = output_dir is None
        if automatic and not self.project_configuration.automatic_checkpoint_naming:
            raise ArgumentError(
                "save_state() needs output_dir, or Accelerator(project_config="
                "ProjectConfiguration(automatic_checkpoint_naming=True), project_dir=…)"
            )
        place = self._checkpoints.next_place() if output_dir is None else Path(output_dir)
        self._checkpoints.save(place, lambda folder: self._fill(folder, safe_serialization))
        if automatic:
            self.project_configuration.iteration += 1
            self._checkpoints.prune()
        return str(place)

    def _fill(self, folder: Path, safe: bool) -> dict[str, Digest]:
        contents = self._contents(models=self._models, safe=safe)
        weights = [self.strategy.model_state(model) for model in self._models]
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, str(folder))
        if self._checkpoints._keeper:
            contents.write_shared(folder, weights)
        contents.write_own(folder, self._window.step, self._window.is_open)
        return contents.written

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **load_model_func_kwargs: Any) -> None:
        """Put back what `save_state` wrote into the objects prepared and registered in this run, in the same order.

        Every file is verified before any is loaded. Without ``input_dir``, or with ``"latest"``, the newest whole
        checkpoint under ``project_dir/checkpoints`` is taken, and damaged ones passed over are named in a warning.
        ``load_model_func_kwargs`` go to `torch.nn.Module.load_state_dict`. Raises `CheckpointError`, on every process.
        """
        newest = input_dir is None or str(input_dir) == "latest"
        if newest and self.project_dir is None:
            raise ArgumentError("load_state() without a directory needs Accelerator(project_dir=…)")
        folder = self._checkpoints.find(None if newest or input_dir is None else Path(input_dir))
        if newest:
            self.project_configuration.iteration = int(folder.name.rpartition("_")[2]) + 1
        models = list(self._models)
        for hook in self._load_model_state_pre_hook.values():
            hook(models, str(folder))
        contents = self._contents(models=models)
        self._window.resume(self._checkpoints.load(folder, contents, **load_model_func_kwargs))
        logger.info(f"loaded {folder}")

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model, by the names it had before (with ``unwrap=False``: it has now)."""
        return self.strategy.model_state(model) if unwrap else dict(model.state_dict())

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write ``obj`` to the file ``f`` on the main process (``save_on_each_node``: one a node), replacing it whole.

        With ``safe_serialization`` it must be a dict of tensors and becomes a safetensors file.
        """
        if not self._checkpoints._keeper:
            return
        place = Path(f)
        draft = place.with_name(f".{place.name}.draft")
        draft.unlink(missing_ok=True)
        if safe_serialization:
            write_tensors(draft, obj)
        else:
            write_object(draft, obj)
        os.replace(draft, place)
