"""Helpers that only code written for Accelerate imports."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from accel.big_models.devices import dtype_named as _get_proper_dtype  # noqa: F401 - diffusers' tests import it
from accel.errors import CollectiveError
from accel.parallel.unwrap import extract_model_from_parallel
from accel.plugins import AutocastKwargs
from accel.precision import choose_precision
from accel.pytree import send_to_device
from accel.state import AcceleratorState
from accel.training.compile import compile_regions_in_place
from accel.training.optimizer import AcceleratedOptimizer

Function = TypeVar("Function", bound=Callable[..., Any])
DistributedOperationException = CollectiveError
compile_regions_fsdp2 = compile_regions_deepspeed = compile_regions_in_place


class GatheredParameters:
    """DeepSpeed's context manager that gathers sharded parameters; it does nothing in a run without DeepSpeed."""

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
    ) -> None:
        deepspeed = sys.modules.get("deepspeed")  # if it was not imported, nothing is sharded by it
        self.gather: AbstractContextManager[Any] = (
            nullcontext()
            if deepspeed is None
            else deepspeed.zero.GatheredParameters(params, modifier_rank, fwd_module, enabled)
        )

    def __enter__(self) -> None:
        self.gather.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.gather.__exit__(*error)


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """An optimizer that an engine of DeepSpeed steps, so that ``step`` and ``zero_grad`` do nothing."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, device_placement=False)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing."""

    def step(self) -> None:  # type: ignore[override]
        """Do nothing."""

    @property
    def step_was_skipped(self) -> bool:
        """True if the engine skipped its last step because gradients overflowed."""
        return bool(getattr(self.optimizer, "overflow", False))


def is_peft_model(model: torch.nn.Module) -> bool:
    """Return True if ``model``, or the model that `Accelerator.prepare` wrapped in it, is a `peft.PeftModel`."""
    if "peft" not in sys.modules:  # no object of a class that was never imported
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def verify_operation(function: Function) -> Function:
    """Return ``function`` unchanged: accel's collectives compare shapes themselves in debug mode."""
    return function


def chained_operation(function: Function) -> Function:
    """Return ``function`` unchanged: errors of accel's collectives name the first one that was called."""
    return function


def move_to_device(state: Any, device: torch.device) -> Any:
    """Put every tensor of an optimizer's state on ``device``."""
    return send_to_device(state, device)


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """Return the class called ``name`` among the modules of ``module``, itself included, or ``None``."""
    return next((type(submodule) for submodule in module.modules() if type(submodule).__name__ == name), None)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers read checkpoints on rank 0 only, from now on."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers read checkpoints on every rank, from now on."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: Any
) -> set[torch.nn.Parameter]:
    """Return the parameters of ``modules``, or of the modules of ``model`` whose full name matches that regex.

    Modules found by name are moved to ``device``.
    """
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [submodule.to(device) for name, submodule in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for submodule in modules or () for parameter in submodule.parameters()}


# Mixed precision and gradient scalers.


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context in this run's mixed precision (`AcceleratorState`); an empty one without ``native_amp``."""
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    name = "bf16" if state.mixed_precision == "fp8" else state.mixed_precision  # 8 bits are in the layers
    return choose_precision(name, state.device, autocast_kwargs, None).autocast(None)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this machine's kind of accelerator; ``kwargs`` are `torch.amp.GradScaler`'s."""
    device = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    return torch.amp.GradScaler(device.type if device is not None else "cuda", **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a `torch.amp.GradScaler`, which also scales the gradients of sharded models."""
    return torch.amp.GradScaler(**kwargs)
