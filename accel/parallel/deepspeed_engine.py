"""DeepSpeed's engine: its import, its accumulation windows, and its files in the universal format."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from accel import collectives
from accel.errors import ArgumentError, CheckpointError
from accel.parallel.deepspeed_layers import total_norm
from accel.state import PartialState
from accel.world.versions import compare_versions

_OLDEST = "0.16.0"
_INSTALL = "pip install 'accel-launch[deepspeed]'"


def load_deepspeed(device: torch.device) -> Any:
    """Import DeepSpeed for ``device``. Raises `ArgumentError` if it is missing, too old, or loaded for another one."""
    try:
        import deepspeed
    except ModuleNotFoundError as error:
        if error.name != "deepspeed":
            raise ArgumentError(f"DeepSpeed needs {error.name}, which is not installed: {_INSTALL}") from error
        raise ArgumentError(f"deepspeed_plugin: DeepSpeed is not installed: {_INSTALL}") from None
    if compare_versions("deepspeed", "<", _OLDEST):
        raise ArgumentError(f"DeepSpeed {deepspeed.__version__} is older than {_OLDEST}: {_INSTALL} --upgrade")
    loaded = deepspeed.accelerator.get_accelerator().device_name()
    if loaded != device.type:
        raise ArgumentError(
            f"DeepSpeed was imported for {loaded}, but this process uses {device}: set DS_ACCELERATOR={device.type} "
            "before its first import"
        )
    if device.type == "cpu":
        # It would compile an extension for minutes at the first start; gloo does without. (`import deepspeed.comm.torch
        # as …` is torch itself.)
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return deepspeed


class DeepSpeedEngineWrapper:
    """An engine that steps where `GradientState` ends an accumulation window.

    ``config``: the configuration, with every ``"auto"`` replaced.
    ``skipped``: True if the last step was skipped because gradients overflowed.
    """

    config: dict[str, Any] | None = None

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.skipped = False
        self._norm: float | None = None

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``, which is divided by the window already; step if they complete it."""
        engine = self.engine
        engine.set_gradient_accumulation_boundary(sync_gradients)
        engine.backward(loss, scale_wrt_gas=False, **kwargs)
        if sync_gradients and engine.gradient_clipping() and not hasattr(engine.optimizer, "_global_grad_norm"):
            self._norm = total_norm(engine)  # without ZeRO, it clips the gradients of the model and keeps no norm
        engine.step()
        if sync_gradients:
            self.skipped = bool(getattr(engine.optimizer, "overflow", False))

    def drop_gradients(self) -> None:
        """Clear all gradients, so that the next backward pass begins a window."""
        engine, optimizer = self.engine, self.engine.optimizer
        engine.zero_grad()
        optimizer.zero_grad()
        if engine.zero_optimization_stage() in (1, 2):  # whose `zero_grad` does not reset these
            optimizer.micro_step_id = sys.modules[type(optimizer).__module__].INITIAL_MICRO_STEP_ID
            optimizer.averaged_gradients = {}
            optimizer.all_grad_tensors = {}

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the gradients at the last step, before clipping; None before the first step."""
        norm = self.engine.get_global_grad_norm()
        return self._norm if norm is None else float(norm)


@contextmanager
def universal_format(source: Path, state: PartialState) -> Iterator[Path]:
    """Yield a folder next to the checkpoint with the files of ``source`` in the universal format, for all processes.

    The main process converts them, and removes them after the block. Raises `CheckpointError` on all processes if
    DeepSpeed cannot.
    """
    root = source.parent.with_name(f".{source.parent.name}.universal")
    errors: list[str | None] = [None]
    if state.is_main_process:
        shutil.rmtree(root, ignore_errors=True)
        try:
            _convert(source, root / source.name)
        except Exception as error:
            errors = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
    try:
        collectives.broadcast_object_list(errors)
        if errors[0] is not None:
            raise CheckpointError(f"{source}: DeepSpeed cannot convert it for another world size: {errors[0]}")
        yield root / source.name
        state.wait_for_everyone()
    finally:
        if state.is_main_process:
            shutil.rmtree(root, ignore_errors=True)


def _convert(source: Path, target: Path) -> None:
    """Convert ZeRO's files, in this process, without the progress that DeepSpeed prints."""
    from deepspeed.checkpoint.ds_to_universal import main

    target.mkdir(parents=True)
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        main(SimpleNamespace(input_folder=str(source), output_folder=str(target), inject_missing_state=True, **options))
