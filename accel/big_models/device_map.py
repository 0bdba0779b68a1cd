"""Device maps, from module names to devices: inferring, checking and shortening them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn

from accel.big_models.devices import Device
from accel.big_models.max_memory import Budget, MaxMemory, get_max_memory
from accel.big_models.module_tensors import check_tied_parameters_in_config, find_tied_parameters
from accel.big_models.sizes import (
    Dtype,
    Named,
    children_of,
    class_names,
    compute_module_sizes,
    convert_file_size_to_int,
    direct_parts,
    get_max_layer_size,
)
from accel.errors import ArgumentError, nearest

logger = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, int | str]:
    """Assign a device to every part of ``model``: accelerators first, then ``"cpu"``, then ``"disk"``, in order.

    No device gets more bytes than ``max_memory`` (default: free memory) allows. The first accelerator and the
    host keep room for the largest remaining layer, so that it can be moved there to compute. Classes in
    ``no_split_module_classes`` are not split, tied weights stay together. ``model`` may be on the meta device.

    ``fallback_allocation`` looks further ahead for a module that fits a device which would stay empty;
    ``clean_result`` shortens the map; ``verbose`` prints each decision. Warns if the buffers of offloaded
    modules, which stay on an accelerator unless ``offload_buffers``, fit on none.
    """
    warn_if_untied(model)
    packing = _Packing(
        model,
        get_max_memory(max_memory),
        class_names(no_split_module_classes),
        compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes),
        look_ahead=fallback_allocation,
        log=print if verbose else None,
    )
    packing.run()
    if not offload_buffers:
        packing.check_buffers(compute_module_sizes(model, dtype, special_dtypes, buffers_only=True))
    packing.report_unused()
    return clean_device_map(packing.device_map) if clean_result else packing.device_map


def warn_if_untied(model: nn.Module) -> None:
    """Log a warning if a model's configuration requires tied weights but the model has none."""
    if check_tied_parameters_in_config(model) and not find_tied_parameters(model):
        logger.warning("%s requires tied weights but has none: call its tie_weights() first", type(model).__name__)


class _Packing:
    """One pass over the parts of a model, filling one device after the other."""

    def __init__(
        self,
        model: nn.Module,
        budget: Budget,
        no_split: list[str],
        sizes: Mapping[str, int | float],
        *,
        look_ahead: bool,
        log: Callable[[str], None] | None,
    ) -> None:
        self.device_map: dict[str, int | str] = {}
        self._budget = budget
        self._devices = list(budget) if "disk" in budget else [*budget, "disk"]
        self._accelerators = [device for device in self._devices if device not in ("cpu", "disk")]
        first = self._accelerators[:1]
        self._reserving_devices = ["mps"] if "mps" in self._accelerators else [*first, "cpu"]
        self._no_split = no_split
        self._sizes = sizes
        self._ties = find_tied_parameters(model)
        self._look_ahead = look_ahead
        self._promoted: set[tuple[int | str, str]] = set()
        self._log = log or (lambda text: None)
        self._queue: list[Named] = direct_parts(model)
        self._used: dict[int | str, int | float] = dict.fromkeys(self._devices, 0)
        self._too_small: dict[int | str, int | float] = {}
        self._current = 0
        self._largest, self._largest_names = get_max_layer_size(self._queue, sizes, no_split)

    def run(self) -> None:
        while self._queue:
            self._assign(*self._queue.pop(0))

    def _assign(self, name: str, module: Any) -> None:
        self._largest_without(name)
        size = self._sizes.get(name, 0)
        ties = _ties_leaving(name, self._ties)
        total, partner_names, partners = get_module_size_with_ties(ties, size, self._sizes, self._queue)
        device = self._devices[self._current]
        available = self._free_bytes(device)
        if available is None or total <= available:
            self._log(f"{name} ({size} bytes) with {partner_names or 'no ties'} → {device} (room: {available})")
            self._place(name, partner_names, total)
        elif ties and size <= available and self._split_a_partner(name, module, partner_names, partners):
            self._log(f"{name} fits {device} without the module it is tied to: split that module")
        elif size >= available and children_of(module, self._no_split):
            self._log(f"{name} ({size} bytes) is more than {device} has ({available}): split it")
            self._queue = [*_split(name, module), *self._queue]
            self._find_largest()
        elif not self._promote(name, module, total):
            self._log(f"{name} ({total} bytes) is more than {device} has ({available}): on to the next device")
            self._next_device(name, module, total)

    def _free_bytes(self, device: int | str) -> int | float | None:
        if device == "disk":
            return None
        reserved = self._largest if device in self._reserving_devices else 0
        return self._budget[device] - reserved - self._used[device]

    def _place(self, name: str, partners: Iterable[str], total: int | float) -> None:
        device = self._devices[self._current]
        self._used[device] += total
        for part in (name, *partners):
            self.device_map[part] = device
        partner_names = set(partners)
        self._queue = [(queued_name, module) for queued_name, module in self._queue if queued_name not in partner_names]

    def _split_a_partner(self, name: str, module: Any, names: list[str], partners: list[Any]) -> bool:
        for partner_name, partner in zip(names, partners, strict=True):
            if children_of(partner, self._no_split):
                position = [queued_name for queued_name, _ in self._queue].index(partner_name)
                children = _split(partner_name, partner)
                self._queue = [(name, module), *self._queue[:position], *children, *self._queue[position + 1 :]]
                self._find_largest()
                return True
        return False

    def _promote(self, name: str, module: Any, total: int | float) -> bool:
        """Move a later module that fits an empty device to the front of the queue; return False if there is none."""
        device = self._devices[self._current]
        if not self._look_ahead or self._used[device] or device == "disk":
            return False
        limit = int(self._budget[device] - max(self._largest, total))
        other_name, other_module, remaining = fallback_allocate(
            self._queue, self._sizes, limit, self._no_split, self._ties
        )
        if other_name is None or other_module is None or (device, other_name) in self._promoted:
            return False
        self._promoted.add((device, other_name))
        self._queue = [(other_name, other_module), (name, module), *remaining]
        return True

    def _next_device(self, name: str, module: Any, total: int | float) -> None:
        device = self._devices[self._current]
        reserved = self._largest if device in self._reserving_devices else 0
        if not self._used[device]:
            self._too_small[device] = total + reserved
        self._used[device] += reserved
        self._current += 1
        self._queue.insert(0, (name, module))

    def _largest_without(self, name: str) -> None:
        self._largest_names = [other for other in self._largest_names if not _under(name, other)]
        if not self._largest_names:
            self._find_largest()

    def _find_largest(self) -> None:
        modules = [(name, module) for name, module in self._queue if isinstance(module, nn.Module)]
        self._largest, self._largest_names = get_max_layer_size(modules, self._sizes, self._no_split)

    def check_buffers(self, sizes: Mapping[str, int | float]) -> None:
        """Warn if the buffers of offloaded modules fit on no accelerator."""
        offloaded = [name for name, device in self.device_map.items() if device in ("cpu", "disk")]
        needed = sum(sizes.get(name, 0) for name in offloaded)
        fits = any(self._budget[device] >= needed + self._used[device] for device in self._accelerators)
        if needed and self._accelerators and not fits:
            warnings.warn(
                f"the buffers of offloaded modules take {needed} bytes, and no accelerator has room for them: "
                "pass offload_buffers=True if memory runs out",
                stacklevel=3,
            )

    def report_unused(self) -> None:
        for device, needed in self._too_small.items():
            logger.info("device map: nothing fits on %s, which would need at least %s bytes", device, needed)


def _under(name: str, other: str) -> bool:
    return other == name or other.startswith(f"{name}.")


def _split(name: str, module: nn.Module) -> list[Named]:
    inner: list[Named] = [*module.named_parameters(recurse=False), *module.named_children()]
    return [(f"{name}.{child}", value) for child, value in inner]


def _ties_leaving(name: str, ties: Iterable[list[str]]) -> list[str]:
    """Return the parameters outside ``name`` that are tied to one inside."""
    outside_ties = []
    for group in ties:
        outside = [param for param in group if not _under(name, param)]
        if 0 < len(outside) < len(group):
            outside_ties += outside
    return outside_ties


def get_module_size_with_ties(
    tied_params: Iterable[str],
    module_size: int | float,
    module_sizes: Mapping[str, int | float],
    modules_to_treat: Iterable[Named],
) -> tuple[int | float, list[str], list[Any]]:
    """Return the bytes of a module and its partners, the names of the partners, and the partners.

    Partners are the modules in ``modules_to_treat`` (those not placed yet) that hold one of ``tied_params``; each
    counts once. ``module_sizes`` counts a tied weight once, as `compute_module_sizes` does.
    """
    partners: dict[str, Any] = {}
    remaining = list(modules_to_treat)
    for param in tied_params:
        holder = next(((name, module) for name, module in remaining if _under(name, param)), None)
        if holder is not None:
            partners[holder[0]] = holder[1]
    return module_size + sum(module_sizes.get(name, 0) for name in partners), list(partners), list(partners.values())


def fallback_allocate(
    modules: list[Named],
    module_sizes: Mapping[str, int | float],
    size_limit: int | str,
    no_split_module_classes: Collection[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, Any, list[Named]]:
    """Find the first module, at any depth, that fits in ``size_limit`` with its ties.

    Returns its name, the module, and the other modules, in which those around it are split; or
    ``(None, None, modules)``.
    """
    try:
        limit = convert_file_size_to_int(size_limit)
    except ArgumentError:
        return None, None, modules
    no_split = class_names(no_split_module_classes)
    search = list(modules)
    while search:
        name, module = search.pop(0)
        ties = _ties_leaving(name, tied_parameters or [])
        total, _, _ = get_module_size_with_ties(ties, module_sizes.get(name, 0), module_sizes, search)
        if total <= limit:
            return name, module, _without(modules, name)
        if children_of(module, no_split):
            search = [*_split(name, module), *search]  # type: ignore[arg-type]
    return None, None, modules


def _without(modules: list[Named], name: str) -> list[Named]:
    remaining: list[Named] = []
    for module_name, module in modules:
        if module_name == name:
            continue
        if _under(module_name, name) and isinstance(module, nn.Module):
            remaining += _without(_split(module_name, module), name)
        else:
            remaining.append((module_name, module))
    return remaining


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Merge, in place, the entries under one module that all have the same device; return the map."""
    keys = [key for key in device_map if not module_name or _under(module_name, key)]
    _regroup(device_map, keys, module_name)
    return device_map


def _regroup(device_map: dict[str, Any], keys: list[str], module_name: str) -> None:
    devices = {device_map[key] for key in keys}
    if len(devices) == 1 and len(keys) > 1:
        for key in keys:
            del device_map[key]
        device_map[module_name] = devices.pop()
        return
    depth = module_name.count(".") + 2 if module_name else 1
    children: dict[str, list[str]] = {}
    for key in keys:
        if len(key) > len(module_name):
            children.setdefault(".".join(key.split(".")[:depth]), []).append(key)
    for child, members in children.items():
        if len(members) > 1:
            _regroup(device_map, members, child)


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that ``device_map`` has a device for every tensor of ``model``'s state dict.

    Raises `ArgumentError` naming the tensors without one. Unknown keys are named there too, or in a warning if
    every tensor has a device.
    """
    tensors = list(model.state_dict())
    known = {*(name for name, _ in model.named_modules()), *tensors, ""}
    unknown = [f"{key!r}{nearest(key, known)}" for key in device_map if key not in known]
    hint = f"unknown device_map keys for {type(model).__name__}: {', '.join(unknown)}" if unknown else ""
    uncovered = [name for name in tensors if device_of(name, device_map) is None]
    if uncovered:
        suffix = f" and {len(uncovered) - 5} more" if len(uncovered) > 5 else ""
        raise ArgumentError(
            f"device_map has no device for {', '.join(uncovered[:5])}{suffix}" + (f"; {hint}" if hint else "")
        )
    if hint:
        warnings.warn(hint, UserWarning, stacklevel=2)


def device_of(name: str, device_map: Mapping[str, Device]) -> Device | None:
    """Return the device of the tensor ``name``: that of its longest matching key, or ``None``."""
    while name not in device_map:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return device_map[name]


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn about tied weights on different devices in ``device_map``: each device gets its own copy."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        missing = [name for name, device in devices.items() if device is None]
        if missing:
            raise ArgumentError(f"device_map has no device for {', '.join(missing)}")
        if len(set(devices.values())) > 1:
            logger.warning("tied weights are on different devices, as copies: %s", devices)
