"""Hooks around a module's forward: base classes, attaching and removing, and `CpuOffload`.

A hooked module keeps its hook as ``_hf_hook`` and its own forward as ``_old_forward``: the names that
libraries which read them expect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accel.big_models.devices import CPU, Device, accelerator_type, as_device, check_device_same, move

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Put on a dispatched model in place of its methods (see `accel.big_models.dispatch`), removed with its hook.
GUARDED_METHODS = ("to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa", "hpu", "neuron", "mtia")


def not_compiled(function: _Function) -> _Function:
    """Exclude ``function`` from `torch.compile`, at no cost if nothing is compiled."""
    uncompiled: Callable[..., Any] | None = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal uncompiled
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if uncompiled is None:
            uncompiled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return uncompiled(*args, **kwargs)

    return cast(_Function, call)


class ModelHook:
    """Base class of hooks around a module's forward; does nothing. ``no_grad``: run forward without gradients."""

    no_grad: bool = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Initialize the hook when it is attached to ``module``; return the module."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and named arguments to pass to forward, given the caller's."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the result to pass to the caller, given the ``output`` of forward."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Clean up when the hook is removed from ``module``; return the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks as one: each is called in order, with the result of the one before."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    @not_compiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    @not_compiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach ``hook`` to ``module.forward``, in place; return the module.

    An existing hook is replaced, or with ``append`` kept and called first.
    """
    present: ModelHook | None = getattr(module, "_hf_hook", None)
    if append and present is not None:
        remove_hook_from_module(module)
        hook = SequentialHook(present, hook)
    hooked: Any = module
    if not (hasattr(module, "_hf_hook") and hasattr(module, "_old_forward")):
        hooked._old_forward = module.forward
    hooked = hook.init_hook(module)
    hooked._hf_hook = hook
    _set_forward(hooked, functools.update_wrapper(functools.partial(_hooked_forward, hooked), hooked._old_forward))
    return cast(nn.Module, hooked)


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    hook: ModelHook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def _set_forward(module: Any, forward: Callable[..., Any]) -> None:
    # A GraphModule recompiles its class's forward when the graph changes, which an attribute would hide.
    target = type(module) if isinstance(module, torch.fx.GraphModule) else module
    target.forward = forward


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove the hook from ``module``, and with ``recurse`` from everything below it; return the module."""
    hooked: Any = module
    hook: ModelHook | None = getattr(module, "_hf_hook", None)
    if hook is not None:
        hook.detach_hook(module)
        del hooked._hf_hook
    if hasattr(module, "_old_forward"):
        _set_forward(hooked, hooked._old_forward)
        del hooked._old_forward
    for method in GUARDED_METHODS:
        vars(module).pop(method, None)
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks from ``module`` and everything below it."""
    remove_hook_from_module(module, recurse=True)


class CpuOffload(ModelHook):
    """A hook that keeps a module on the host until its forward, then moves it to a device, where it stays.

    ``prev_module_hook``: the hook of the preceding module in a pipeline, which is moved back to the host first.
    ``execution_device`` defaults to this machine's accelerator, or the host if it has none.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = as_device(execution_device if execution_device is not None else _default_device())

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @not_compiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if (
            isinstance(self.prev_module_hook, UserCpuOffloadHook)
            and _first_parameter_device(self.prev_module_hook.model) != CPU
        ):
            self.prev_module_hook.offload()
            if (kind := accelerator_type()) is not None:
                torch.get_device_module(kind).empty_cache()
        if not check_device_same(_first_parameter_device(module), self.execution_device):
            module.to(self.execution_device)
        return move(args, self.execution_device), move(kwargs, self.execution_device)


def _default_device() -> str:
    return accelerator_type() or "cpu"


def _first_parameter_device(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return CPU if first is None else first.device


class UserCpuOffloadHook:
    """A model and its `CpuOffload`, for scripts that decide when the model is moved back to the host."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model back to the host."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook from the model, which stays on its device."""
        remove_hook_from_module(self.model)
