"""Automatic mixed precision: bf16, and fp16 with a gradient scaler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType, SimpleNamespace
from typing import Any

import torch

from accel.plugins import AutocastKwargs, GradScalerKwargs
from accel.precision.base import Precision
from accel.precision.outputs import convert_to_fp32


class AutocastForward:
    """A forward that runs under autocast and returns fp32; picklable, unlike a closure. ``dtype`` None: no autocast."""

    def __init__(
        self, forward: Callable[..., Any], device_type: str, dtype: torch.dtype | None, options: dict[str, Any]
    ) -> None:
        self.forward = forward
        self.device_type = device_type
        self.dtype = dtype
        self.options = options

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function that `inspect.signature` reads."""
        return self.forward

    def bound_to(self, module: torch.nn.Module, replacement: torch.nn.Module) -> AutocastForward:
        """Return the same for ``replacement``, which replaces ``module``."""
        forward = self.forward
        if isinstance(forward, MethodType) and forward.__self__ is module:
            forward = MethodType(forward.__func__, replacement)
        return AutocastForward(forward, self.device_type, self.dtype, self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass under autocast; return its outputs in fp32."""
        if self.dtype is None:
            return convert_to_fp32(self.forward(*args, **kwargs))
        with torch.autocast(self.device_type, self.dtype, **self.options):
            outputs = self.forward(*args, **kwargs)
        return convert_to_fp32(outputs)


class LowPrecision(Precision):
    """Matrix products in ``dtype``, weights and outputs in fp32."""

    def __init__(self, device: torch.device, dtype: torch.dtype, autocast: AutocastKwargs | None = None) -> None:
        super().__init__(device)
        self.dtype = dtype
        self.options = (autocast or AutocastKwargs()).to_kwargs()

    def wrap_forward(self, model: torch.nn.Module, autocast: bool = True) -> None:
        """Make ``model`` compute under autocast and return fp32 wherever it is called. Idempotent."""
        dtype = self.dtype if autocast else None
        current = vars(model).get("forward")
        if isinstance(current, AutocastForward) and current.dtype == dtype:
            return
        restore_forward(model)
        vars(model)["_original_forward"] = vars(model).get("forward")
        vars(model)["forward"] = AutocastForward(model.forward, self.device.type, dtype, self.options)

    def autocast(self, handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context manager that runs operations in this precision; ``handler`` replaces the options."""
        options = self.options if handler is None else handler.to_kwargs()
        return torch.autocast(self.device.type, self.dtype, **options)


class ReportingGradScaler(torch.amp.GradScaler):
    """torch's gradient scaler, which records skipped steps and takes gradients in several device meshes."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        # As torch's, which reads the same numbers and does not keep them. Reading them again would cost a
        # synchronization.
        skipped = any(found_inf.item() for found_inf in optimizer_state["found_inf_per_device"].values())
        optimizer_state["skipped"] = skipped
        return None if skipped else optimizer.step(*args, **kwargs)

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        # torch pools the gradients of all groups, but one operation takes those of one mesh only.
        meshes: dict[Any, list[Any]] = {}
        for group in optimizer.param_groups:
            if group["params"]:
                meshes.setdefault(getattr(group["params"][0], "device_mesh", None), []).append(group)
        if len(meshes) <= 1:
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        total: dict[torch.device, torch.Tensor] = {}
        for groups in meshes.values():
            part: Any = SimpleNamespace(param_groups=groups)
            for device, found_inf in super()._unscale_grads_(part, *args, **kwargs).items():
                # Fused optimizers skip their step if it is 1.
                total[device] = torch.maximum(total.get(device, found_inf), found_inf)
        return total


class HalfPrecision(LowPrecision):
    """fp16 with scaled losses, so that small gradients survive; steps with overflowed gradients are skipped."""

    def __init__(
        self, device: torch.device, autocast: AutocastKwargs | None = None, scaler: GradScalerKwargs | None = None
    ) -> None:
        super().__init__(device, torch.float16, autocast)
        self.scaler = ReportingGradScaler(device.type, **(scaler or GradScalerKwargs()).to_kwargs())


def restore_forward(model: torch.nn.Module) -> None:
    """Undo `Precision.wrap_forward` on ``model``."""
    attributes = vars(model)
    if isinstance(attributes.get("forward"), AutocastForward):
        original = attributes.pop("_original_forward")
        del attributes["forward"]
        if original is not None:
            attributes["forward"] = original
