"""Activations that are computed again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn


class CheckpointedForward:
    """A forward of which only the inputs are kept, on the CPU with ``offload``; pickles, unlike a closure.

    It takes the forward's place on the module, so that no name in the state dict changes.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool = False) -> None:
        self.forward = forward
        self.offload = offload

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What `inspect.signature` reads."""
        return self.forward

    def bound_to(self, module: nn.Module, twin: nn.Module) -> CheckpointedForward:
        """The same for ``twin``, which takes the place of ``module``."""
        forward = self.forward
        if isinstance(forward, MethodType) and forward.__self__ is module:
            forward = MethodType(forward.__func__, twin)
        return CheckpointedForward(forward, self.offload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch.autograd.graph import save_on_cpu
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if self.offload else nullcontext():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def checkpoint_activations(modules: Iterable[nn.Module], offload: bool = False) -> None:
    """Have each of ``modules`` keep only its inputs; twice is as once."""
    for module in modules:
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            vars(module)["forward"] = CheckpointedForward(module.forward, offload)
