"""The tensors of modules by name: listing them, finding and restoring ties, placing one on a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accel.big_models.devices import META, Device, as_device, check_device_same, dtype_named
from accel.errors import ArgumentError, nearest

SCALES = "SCB"
TiedParams = dict[int, dict[torch.device, torch.Tensor]]


def named_module_tensors(
    module: nn.Module, include_buffers: bool = True, recurse: bool = False, remove_non_persistent: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of the parameters, then buffers, of ``module``; each tensor once.

    ``recurse`` includes submodules; ``remove_non_persistent`` excludes the buffers that no state dict holds.
    """
    yield from module.named_parameters(recurse=recurse)
    if not include_buffers:
        return
    excluded = get_non_persistent_buffers(module, recurse=recurse, fqns=True) if remove_non_persistent else set()
    for name, buffer in module.named_buffers(recurse=recurse):
        if name not in excluded:
            yield name, buffer


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that no state dict holds; with ``fqns`` they start with their module's path."""
    if not recurse:
        return set(module._non_persistent_buffers_set)
    names = set()
    for path, child in module.named_modules():
        prefix = f"{path}." if fqns and path else ""
        names |= {prefix + name for name in child._non_persistent_buffers_set}
    return names


def owner_of(module: nn.Module, tensor_name: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds ``tensor_name``, and the name in it. Raises `ArgumentError` if none does."""
    path, _, name = tensor_name.rpartition(".")
    owner: Any = module
    for part in path.split(".") if path else ():
        owner = getattr(owner, part, None)
        if not isinstance(owner, nn.Module):
            break
    if not isinstance(owner, nn.Module) or not (name in owner._parameters or name in owner._buffers):
        known = [known_name for known_name, _ in named_module_tensors(module, recurse=True)]
        raise ArgumentError(
            f"{type(module).__name__} has no parameter or buffer {tensor_name!r}{nearest(tensor_name, known)}"
        )
    return owner, name


def tensor_named(module: nn.Module, tensor_name: str) -> torch.Tensor | None:
    """Return the parameter or buffer called ``tensor_name``; ``None`` if it is registered as None."""
    owner, name = owner_of(module, tensor_name)
    return owner._parameters[name] if name in owner._parameters else owner._buffers[name]


def like_parameter(old: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with the value ``data`` and the class, attributes and ``requires_grad`` of ``old``."""
    requires_grad = old.requires_grad and is_real(data)
    if not issubclass(type(old), nn.Parameter):  # a tensor subclass that only passes isinstance()
        return nn.Parameter(data, requires_grad=requires_grad)
    new: nn.Parameter = torch.Tensor._make_subclass(type(old), data, requires_grad)
    vars(new).update(vars(old))
    return new


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return device, address and length in bytes of ``tensor``'s storage: equal for views of one storage.

    They are also equal for all meta tensors of one size.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return groups of names, each sorted, of parameters that are the same object. ``kwargs`` has no effect."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make each group of names one parameter again: the first of the group that is not on the meta device.

    A name whose parameter is on another device keeps that copy: its module computes there.
    """
    for group in tied_params:
        owners = [owner_of(model, name) for name in group]
        values = [owner._parameters.get(name) for owner, name in owners]
        shared = next((value for value in values if value is not None and value.device != META), None)
        if shared is None:
            continue
        for (owner, name), value in zip(owners, values, strict=True):
            if value is None or value.device in (META, shared.device):
                owner._parameters[name] = shared


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return True if the configuration of a transformers model requires tied weights."""
    if not any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)
    return bool(
        (getattr(text, "tie_word_embeddings", False) and embeddings() is not None)
        or (getattr(config, "is_encoder_decoder", False) and getattr(config, "tie_encoder_decoder", False))
        or any(hasattr(module, "_tie_weights") for module in model.modules())
    )


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: TiedParams | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put the parameter or buffer ``tensor_name`` of ``module`` on ``device``, with ``value`` if one is given.

    A value is cast to the type of the tensor that it replaces, or to ``dtype``, which affects no integers and no
    booleans. A parameter keeps its class, its attributes and ``requires_grad``. ``fp16_statistics`` becomes its
    ``SCB``. ``tied_params_map`` (address of a tied weight → device → the copy there) limits each tied weight to
    one copy per device. ``clear_cache`` empties the accelerator's cache afterwards.

    Raises `ArgumentError` for an unknown name or device, for a value of another shape, and for moving a tensor
    from the meta device without a value.
    """
    owner, name = owner_of(module, tensor_name)
    old = owner._parameters[name] if name in owner._parameters else owner._buffers[name]
    target = as_device(device)
    if old is None:
        raise ArgumentError(f"{tensor_name} of {type(module).__name__} is registered as None: nothing to place")
    copies = _copies_of(tied_params_map, value, old)
    if copies is not None and target in copies:
        _put(owner, name, copies[target])
        return
    if value is None:
        new = _converted(old, target, dtype_named(dtype), tensor_name, non_blocking)
    else:
        new = replacement(old, target, value, dtype_named(dtype), name=tensor_name, non_blocking=non_blocking)
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target, non_blocking=non_blocking)  # type: ignore[attr-defined]
    _put(owner, name, new)
    if copies is not None:
        copies[target] = new
    if clear_cache and target.type not in ("cpu", "meta"):
        torch.get_device_module(target).empty_cache()


def _copies_of(
    tied: TiedParams | None, value: torch.Tensor | None, old: torch.Tensor
) -> dict[torch.device, torch.Tensor] | None:
    if not tied:
        return None
    for tensor in (value, old):
        if tensor is not None and (copies := tied.get(tensor.data_ptr())) is not None:
            return copies
    return None


def _put(owner: nn.Module, name: str, tensor: torch.Tensor) -> None:
    if name in owner._parameters:
        owner._parameters[name] = tensor  # type: ignore[assignment]
    else:
        owner._buffers[name] = tensor


def _converted(
    old: torch.Tensor, target: torch.device, dtype: torch.dtype | None, name: str, non_blocking: bool
) -> torch.Tensor:
    if old.device == META and target != META:
        raise ArgumentError(f"{name} is on the meta device and has no values: pass the value to put on {target}")
    target_dtype = dtype if dtype is not None and is_real(old) else old.dtype
    if check_device_same(old.device, target) and target_dtype == old.dtype:
        return old
    data = old.detach().to(target, target_dtype, non_blocking=non_blocking)
    return like_parameter(old, data) if isinstance(old, nn.Parameter) else data


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` without values, on the meta device."""
    return _converted(tensor, META, None, "", False)


def replacement(
    old: torch.Tensor,
    target: torch.device,
    value: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    name: str,
    non_blocking: bool = False,
) -> torch.Tensor:
    """Return ``value`` on ``target`` as a replacement for ``old``; see `set_module_tensor_to_device`."""
    quantised = quantises_on_move(old)
    if old.shape != value.shape and not quantised:
        raise ArgumentError(f"{name} has shape {tuple(old.shape)}, but its new value has {tuple(value.shape)}")
    if dtype is None:
        value = value.to(old.dtype, non_blocking=non_blocking)
    elif is_real(value):
        value = value.to(dtype, non_blocking=non_blocking)
    if quantised:
        return _quantised(old, value, target)
    data = value.detach().to(target, non_blocking=non_blocking)
    return like_parameter(old, data) if isinstance(old, nn.Parameter) else data


def is_real(tensor: torch.Tensor) -> bool:
    """Return True for floating-point and complex tensors, which ``dtype`` arguments convert."""
    return tensor.is_floating_point() or tensor.is_complex()


def quantises_on_move(old: torch.Tensor) -> bool:
    """Return True for parameter classes (those of bitsandbytes) that quantize when moved to an accelerator."""
    return issubclass(type(old), nn.Parameter) and type(old).to is not torch.Tensor.to


def scales_name(weight_name: str) -> str:
    """Return the name under which bitsandbytes saves the scales of an int8 weight."""
    return f"{weight_name.rpartition('weight')[0]}{SCALES}"


def _quantised(old: torch.Tensor, value: torch.Tensor, target: torch.device) -> torch.Tensor:
    accepted = inspect.signature(type(old).__new__).parameters
    extra = {key: attr for key, attr in vars(old).items() if key in accepted and key not in ("data", "requires_grad")}
    kind: Any = type(old)
    parameter: torch.Tensor = kind(value, requires_grad=old.requires_grad, **extra).to(target)
    return parameter
