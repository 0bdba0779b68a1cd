"""Attaching `AlignDevicesHook` to the modules of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from accel.big_models.align import AlignDevicesHook
from accel.big_models.device_names import META, Device
from accel.big_models.hooks import add_hook_to_module
from accel.big_models.module_tensors import TiedParams, named_module_tensors, set_module_tensor_to_device, tensor_named
from accel.big_models.offload import PrefixedDataset


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
    whole = offload and type(module).__name__ in (preload_module_classes or ())
    if whole or next(named_module_tensors(module), None) is not None:
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=whole,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        add_hook_to_module(module, hook, append=True)
    if whole:
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
    away = offload if isinstance(offload, Mapping) else None
    _Blocks(
        devices=devices if devices is not None else dict.fromkeys(away or (), execution_device),  # type: ignore[arg-type]
        away=away if away is not None else dict.fromkeys(devices or (), bool(offload)),
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        tied=tied_params_map,
    ).attach(module, module_name)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    devices: Mapping[str, Device]
    away: Mapping[str, bool]
    weights_map: Mapping[str, torch.Tensor] | None
    offload_buffers: bool
    skip_keys: str | Collection[str] | None
    preload: Collection[str]
    tied: TiedParams | None

    def attach(self, module: nn.Module, name: str) -> None:
        if name in self.devices and name in self.away:
            if self.away[name]:
                self._offload(module, name)
            else:
                self._place(module, name)
        else:
            self._place_own(module, name)
        for child_name, child in module.named_children():
            self.attach(child, f"{name}.{child_name}" if name else child_name)

    def _place_own(self, module: nn.Module, name: str) -> None:
        """Place tensors that the map names one by one on their module's device, that of the first of them."""
        paths = {own: f"{name}.{own}" if name else own for own, _ in named_module_tensors(module)}
        named = [own for own, path in paths.items() if path in self.devices]
        device = self.devices.get("") if not name else self.devices[paths[named[0]]] if named else None
        for own in named:
            tensor = tensor_named(module, own)
            if tensor is not None and tensor.device == META and self.weights_map is not None and device is not None:
                set_module_tensor_to_device(module, own, device, value=self.weights_map[paths[own]], clear_cache=False)
        if named or not name:
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
