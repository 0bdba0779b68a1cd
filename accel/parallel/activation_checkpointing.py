"""Activations that are recomputed in the backward pass instead of stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn


class CheckpointedForward:
    """A forward that stores only its inputs, on the CPU with ``offload``; picklable, unlike a closure.

    It replaces the forward on the module, so that no name in the state dict changes.
    """

    def __init__(self, forward: Callable[..., Any], offload: bool = False) -> None:
        self.forward = forward
        self.offload = offload

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function that `inspect.signature` reads."""
        return self.forward

    def bound_to(self, module: nn.Module, replacement: nn.Module) -> CheckpointedForward:
        """Return the same for ``replacement``, which replaces ``module``."""
        forward = self.forward
        if isinstance(forward, MethodType) and forward.__self__ is module:
            forward = MethodType(forward.__func__, replacement)
        return CheckpointedForward(forward, self.offload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass and recompute its activations in the backward pass."""
        from torch.autograd.graph import save_on_cpu
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if self.offload else nullcontext():
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def checkpoint_activations(modules: Iterable[nn.Module], offload: bool = False) -> None:
    """Make each of ``modules`` store only its inputs. Idempotent."""
    for module in modules:
        if not isinstance(vars(module).get("forward"), CheckpointedForward):
            vars(module)["forward"] = CheckpointedForward(module.forward, offload)
