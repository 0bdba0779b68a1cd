"""`AlignDevicesHook`, which moves weights and inputs to one device for a forward, and its attachment to models."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from accel.big_models.devices import CPU, META, Device, as_device, device_of_first, move
from accel.big_models.hooks import ModelHook, SequentialHook, add_hook_to_module, not_compiled
from accel.big_models.module_tensors import (
    TiedParams,
    emptied,
    named_module_tensors,
    owner_of,
    replacement,
    scales_name,
    set_module_tensor_to_device,
    tensor_named,
)
from accel.big_models.offload import PrefixedDataset


class _LoadedTensor(NamedTuple):
    """A tensor that is in its module for one forward, and the one that it replaced."""

    store: dict[str, Any]
    local_name: str
    previous: torch.Tensor
    copies_by_device: dict[torch.device, torch.Tensor] | None
    device: torch.device

    def unload(self) -> None:
        """Restore the previous tensor, and drop the copy of a tied weight that was made for this forward."""
        self.store[self.local_name] = self.previous if self.previous.device == META else emptied(self.previous)
        if self.copies_by_device is not None:
            self.copies_by_device.pop(self.device, None)


class AlignDevicesHook(ModelHook):
    """A hook that keeps a module's inputs and own tensors on ``execution_device`` during its forward.

    - ``offload``: between forwards the parameters, and with ``offload_buffers`` the persistent buffers, are on
      the meta device; ``weights_map`` (name in the module → tensor) holds their values, by default copies on the
      host. Without an ``execution_device`` the forward then runs on the host.
    - ``io_same_device``: move the output to the device of the input.
    - ``place_submodules``: include the tensors of everything below the module.
    - ``skip_keys``: named arguments, and keys of outputs, that are not moved.
    - ``tied_params_map``: see `set_module_tensor_to_device`.

    Forwards do not change the values of ``weights_map``, so weights cannot be trained while offloaded.
    """

    def __init__(
        self,
        execution_device: Device | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | Collection[str] | None = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: torch.device | None = None
        self.original_devices: dict[str, torch.device] = {}
        self._tied: dict[str, int] = {}  # name → the key of tied_params_map that stands for its weight
        self._loaded: list[_LoadedTensor] = []
        self._device: tuple[Device, torch.device] | None = None

    def __repr__(self) -> str:
        names = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        return f"AlignDevicesHook({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def init_hook(self, module: nn.Module) -> nn.Module:
        if self.execution_device is not None and as_device(self.execution_device) == META:
            self.tied_params_map = None  # on the meta device every tensor has the same address
        if self.offload:
            self._offload(module)
        elif self.execution_device is not None:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                self._place(module, name, self.execution_device, tied=self.tied_params_map)
        return module

    def _offload(self, module: nn.Module) -> None:
        if self.execution_device is None:
            self.execution_device = CPU  # where the weights are kept
        tensors = dict(self._tensors(module))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        slots = list(self._slots(module))
        self._tied.clear()
        self._loaded.clear()
        if self.weights_map is None:
            self.weights_map = {name: store[key].detach().to("cpu") for name, store, key in slots}
        for name, store, key in slots:
            address = store[key].data_ptr()
            if self.tied_params_map and address in self.tied_params_map:
                self._tied[name] = address
            store[key] = emptied(store[key])
        for name in tensors.keys() - {name for name, _, _ in slots}:
            self._place(module, name, self.execution_device, tied=self.tied_params_map)

    def _slots(self, module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield name, dict and key of each tensor to offload between forwards; a tied one under all its names."""
        for path, owner in module.named_modules() if self.place_submodules else (("", module),):
            prefix = f"{path}." if path else ""
            for key, param in owner._parameters.items():
                if param is not None:
                    yield prefix + key, owner._parameters, key
            for key, buffer in owner._buffers.items() if self.offload_buffers else ():
                if buffer is not None and key not in owner._non_persistent_buffers_set:
                    yield prefix + key, owner._buffers, key

    def _tensors(self, module: nn.Module) -> list[tuple[str, torch.Tensor]]:
        recurse = self.place_submodules
        params = module.named_parameters(recurse=recurse, remove_duplicate=False)
        return [*params, *module.named_buffers(recurse=recurse, remove_duplicate=False)]

    def _place(
        self,
        module: nn.Module,
        name: str,
        device: Device,
        value: torch.Tensor | None = None,
        tied: TiedParams | None = None,
    ) -> None:
        set_module_tensor_to_device(
            module,
            name,
            device,
            value=value,
            fp16_statistics=self._statistics(name, value),
            tied_params_map=tied,
            clear_cache=False,
        )

    def _statistics(self, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
        """Return the scales that bitsandbytes keeps for an int8 weight."""
        if value is None or value.dtype != torch.int8 or self.weights_map is None:
            return None
        return self.weights_map.get(scales_name(name))

    @not_compiled
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.io_same_device:
            self.input_device = device_of_first([args, kwargs])
        if self.execution_device is None:
            return args, kwargs
        if self._device is None or self._device[0] is not self.execution_device:
            self._device = (self.execution_device, as_device(self.execution_device))
        device = self._device[1]
        if self.offload:
            self._load(module, device)
        return move(args, device), move(kwargs, device, self.skip_keys)

    def _load(self, module: nn.Module, device: torch.device) -> None:
        assert self.weights_map is not None
        for name, store, key in self._slots(module):
            old = store[key]
            copies = self._copies(name)
            is_first_copy = copies is not None and device not in copies
            if copies is not None and not is_first_copy:
                store[key] = copies[device]
            else:
                value = self.weights_map[name]
                store[key] = replacement(old, device, value, name=name)
                if value.dtype == torch.int8 and (scales := self._statistics(name, value)) is not None:
                    store[key].SCB = scales.to(device)
            if copies is not None and is_first_copy:
                copies[device] = store[key]
            self._loaded.append(_LoadedTensor(store, key, old, copies if is_first_copy else None, device))

    @not_compiled
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        if self.offload:
            while self._loaded:
                self._loaded.pop().unload()
            _forget_quantised_state(module)
        if self.io_same_device and self.input_device is not None:
            output = move(output, self.input_device, self.skip_keys)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        if self.offload:
            for name, device in self.original_devices.items():
                if device != META:
                    self._restore(module, name, device)
        return module

    def _restore(self, module: nn.Module, name: str, device: torch.device) -> None:
        """Put a tensor on ``device`` permanently: a tied one as one parameter, a memory-mapped one as a copy."""
        assert self.weights_map is not None
        copies = self._copies(name)
        if copies is not None and device in copies:
            owner, key = owner_of(module, name)
            owner._parameters[key] = copies[device]  # type: ignore[assignment]
            return
        value = self.weights_map.get(name)
        if value is not None and getattr(self.weights_map, "reads_file", lambda name: False)(name):
            value = value.clone()
        self._place(module, name, device, value)
        tensor = tensor_named(module, name)
        if copies is not None and tensor is not None:
            copies[device] = tensor

    def _copies(self, name: str) -> dict[torch.device, torch.Tensor] | None:
        """Return the existing copies of the weight ``name``, by device, if it is tied."""
        key = self._tied.get(name)
        return None if key is None or self.tied_params_map is None else self.tied_params_map.get(key)


def _forget_quantised_state(module: Any) -> None:
    if type(module).__name__ == "Linear8bitLt":
        for name in ("CB", "SCB", "CxB"):  # the last: before bitsandbytes 0.45
            setattr(module.state, name, None)


def offloading_hook(module: nn.Module) -> AlignDevicesHook | None:
    """Return the hook of ``module`` that offloads its weights between forwards, even if it is one of several."""
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return next((inner for inner in hooks if isinstance(inner, AlignDevicesHook) and inner.offload), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Return True if the own tensors of ``module`` are offloaded between its forwards."""
    return offloading_hook(module) is not None


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Keep the own tensors of ``module`` on ``execution_device`` in the block, offloaded ones with their values.

    The default is the execution device of the module's offloading hook; without both nothing moves.
    """
    hook = offloading_hook(module)
    if hook is not None:
        previous = hook.execution_device
        if execution_device is not None:
            hook.execution_device = execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, None)
            hook.execution_device = previous
    elif execution_device is not None:
        parameters = dict(module.named_parameters(recurse=False))
        try:
            for name in parameters:
                set_module_tensor_to_device(module, name, execution_device)
            yield
        finally:
            for name, param in parameters.items():
                value = param if as_device(execution_device) == META else None  # the meta device kept no values
                set_module_tensor_to_device(module, name, param.device, value=value)
    else:
        yield


# Attach `AlignDevicesHook` to the right modules of a model.


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Make every module in ``module`` that has tensors, and no hook yet, compute on ``execution_device``.

    Modules below a class in ``preload_module_classes`` get no hook.
    """
    if not hasattr(module, "_hf_hook") and _has_state(module):
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def _has_state(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or bool(module.state_dict())


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to ``module`` and all below it that have tensors of their own.

    ``module_name`` is the path of ``module`` in the model whose weights ``weights_map`` holds. With ``offload``,
    a class in ``preload_module_classes`` gets one hook for everything below it: for modules whose forward uses
    the weights of a submodule without calling it.
    """
    preload = offload and type(module).__name__ in (preload_module_classes or ())
    if preload or next(named_module_tensors(module), None) is not None:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=preload,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if preload:
        return
    for name, child in module.named_children():
        attach_align_device_hook(
            child,
            execution_device=execution_device,
            offload=offload,
            weights_map=weights_map,
            offload_buffers=offload_buffers,
            module_name=f"{module_name}.{name}" if module_name else name,
            skip_keys=skip_keys,
            preload_module_classes=preload_module_classes,
            tied_params_map=tied_params_map,
        )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | Collection[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach hooks to the blocks named in ``execution_device`` and ``offload``, or to the whole model.

    A block that is not offloaded is moved to its device now; one that is offloaded gets a hook per module.
    """
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(
                module,
                execution_device=execution_device,
                offload=True,
                weights_map=weights_map,
                offload_buffers=offload_buffers,
                module_name=module_name,
                skip_keys=skip_keys,
                preload_module_classes=preload_module_classes,
                tied_params_map=tied_params_map,
            )
        else:
            hook = AlignDevicesHook(
                execution_device=execution_device,
                io_same_device=True,
                skip_keys=skip_keys,
                place_submodules=True,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(module, hook)
        return
    devices = execution_device if isinstance(execution_device, Mapping) else None
    offload_map = offload if isinstance(offload, Mapping) else None
    _Blocks(
        devices=devices if devices is not None else dict.fromkeys(offload_map or (), execution_device),  # type: ignore[arg-type]
        offload=offload_map if offload_map is not None else dict.fromkeys(devices or (), bool(offload)),
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        tied=tied_params_map,
    ).attach(module, module_name)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    devices: Mapping[str, Device]
    offload: Mapping[str, bool]
    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: str | Collection[str] | None
    preload: Collection[str]
    tied: TiedParams | None

    def attach(self, module: nn.Module, name: str) -> None:
        if name in self.devices and name in self.offload:
            if self.offload[name]:
                self._offload(module, name)
            else:
                self._place(module, name)
        else:
            self._place_own(module, name)
        for child_name, child in module.named_children():
            self.attach(child, f"{name}.{child_name}" if name else child_name)

    def _place_own(self, module: nn.Module, name: str) -> None:
        """Place tensors that the map names one by one on their module's device, that of the first of them."""
        paths = {key: f"{name}.{key}" if name else key for key, _ in named_module_tensors(module)}
        mapped = [key for key, path in paths.items() if path in self.devices]
        device = self.devices.get("") if not name else self.devices[paths[mapped[0]]] if mapped else None
        for key in mapped:
            tensor = tensor_named(module, key)
            if tensor is not None and tensor.device == META and self.weights_map is not None and device is not None:
                set_module_tensor_to_device(module, key, device, value=self.weights_map[paths[key]], clear_cache=False)
        if mapped or not name:
            self._hook(module, device, io_same_device=not name)

    def _place(self, module: nn.Module, name: str) -> None:
        device = self.devices[name]
        self._hook(module, device, io_same_device=name == "", place_submodules=True)
        attach_execution_device_hook(module, device, skip_keys=self.skip_keys, tied_params_map=self.tied)

    def _offload(self, module: nn.Module, name: str) -> None:
        device = self.devices[name]
        attach_align_device_hook(
            module,
            execution_device=device,
            offload=True,
            weights_map=self.weights_map,
            offload_buffers=self.offload_buffers,
            module_name=name,
            skip_keys=self.skip_keys,
            preload_module_classes=self.preload,
            tied_params_map=self.tied,
        )
        if not hasattr(module, "_hf_hook"):
            self._hook(module, device, io_same_device=name == "")
        attach_execution_device_hook(module, device, self.skip_keys, self.preload, self.tied)

    def _hook(
        self, module: nn.Module, device: Device | None, *, io_same_device: bool, place_submodules: bool = False
    ) -> None:
        hook = AlignDevicesHook(
            execution_device=device,
            offload_buffers=self.offload_buffers,
            io_same_device=io_same_device,
            place_submodules=place_submodules,
            skip_keys=self.skip_keys,
            tied_params_map=self.tied,
        )
        add_hook_to_module(module, hook)
