"""Helpers that only code written for Accelerate asks for."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from accel.big_models.device_names import dtype_named as _get_proper_dtype  # noqa: F401 - diffusers' tests import it
from accel.errors import CollectiveError
from accel.parallel.unwrap import extract_model_from_parallel
from accel.pytree import send_to_device
from accel.training.compile import compile_regions_in_place

Function = TypeVar("Function", bound=Callable[..., Any])
DistributedOperationException = CollectiveError
compile_regions_fsdp2 = compile_regions_in_place


class GatheredParameters(nullcontext[None]):
    """A region in which parameters that DeepSpeed has split are whole: there are none here, so that it does nothing."""

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True):
        super().__init__()


def is_peft_model(model: torch.nn.Module) -> bool:
    """Whether ``model``, or what `Accelerator.prepare` was given to make it, is a `peft.PeftModel`."""
    if "peft" not in sys.modules:  # no object of a class that was never imported
        return False
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def verify_operation(function: Function) -> Function:
    """Return ``function``: collectives of accel compare shapes by themselves in debug mode."""
    return function


def chained_operation(function: Function) -> Function:
    """Return ``function``: what a collective of accel raises names the first one that was called."""
    return function


def move_to_device(state: Any, device: torch.device) -> Any:
    """Put every tensor of an optimizer's state on ``device``."""
    return send_to_device(state, device)


def get_module_class_from_name(module: torch.nn.Module, name: str) -> type | None:
    """The class called ``name`` of a module inside ``module``, or its own; ``None`` if there is none."""
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def enable_fsdp_ram_efficient_loading() -> None:
    """Have transformers read a checkpoint on rank 0 alone, from now on."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Have transformers read a checkpoint on every rank, from now on."""
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "False"


def get_parameters_from_modules(
    modules: Iterable[torch.nn.Module] | str | None, model: torch.nn.Module, device: Any
) -> set[torch.nn.Parameter]:
    """The parameters of ``modules``, or of the modules of ``model`` whose whole name matches a regular expression.

    Those found by name are put on ``device``.
    """
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [inner.to(device) for name, inner in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for inner in modules or () for parameter in inner.parameters()}
