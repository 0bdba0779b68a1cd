"""The memory of each device for a model, and balancing a model over accelerators."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from accel.big_models.devices import accelerator_type
from accel.big_models.sizes import Dtype, class_names, compute_module_sizes, convert_file_size_to_int
from accel.errors import ArgumentError, nearest

logger = logging.getLogger(__name__)

MaxMemory = dict[int | str, int | str]
Budget = dict[int | str, int]

# The share of a sole accelerator's memory that weights may take; the rest is for activations.
_FOR_WEIGHTS = 0.9


def available_host_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate: free memory, or less if a control group limits it."""
    if not sys.platform.startswith("linux"):
        import psutil

        return int(psutil.virtual_memory().available)
    meminfo = _numbers(root / "proc/meminfo")
    free = meminfo["MemAvailable:"] * 1024
    return min([free, *_cgroup_headroom(root)])


def _cgroup_headroom(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group around this process, of version 2 or 1, still allows."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, cache = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            used, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            try:
                allowed, in_use = (folder / limit).read_text(), int((folder / used).read_text())
                reclaimable = _numbers(folder / "memory.stat").get(cache, 0)
            except (OSError, ValueError):
                allowed = "max"
            if allowed.strip() != "max":
                yield max(0, int(allowed) - in_use + reclaimable)
            if folder == top:
                break


def _numbers(path: Path) -> dict[str, int]:
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def get_max_memory(max_memory: MaxMemory | None = None) -> Budget:
    """Return the bytes for each device: free memory, or ``max_memory`` in bytes and in order.

    The order is accelerators by number, ``mps``, ``cpu``, ``disk``. Text in ``max_memory``, such as ``"10GB"``,
    is replaced there by its bytes. Raises `ArgumentError` for a device that is none of these and for an invalid
    size; warns about an accelerator that this machine lacks.
    """
    if max_memory is None:
        return _free_memory()
    for device, size in max_memory.items():
        if isinstance(device, str) and device not in ("mps", "cpu", "disk"):
            known = ["mps", "cpu", "disk"]
            raise ArgumentError(
                f"max_memory: unknown device {device!r}: use integers for accelerators, 'mps', 'cpu' or 'disk'"
                f"{nearest(device, known)}"
            )
        if isinstance(size, str):
            max_memory[device] = convert_file_size_to_int(size)  # callers read the numbers back from their own dict
    numbers = sorted(device for device in max_memory if isinstance(device, int))
    count = torch.accelerator.device_count() if accelerator_type() else 0
    missing = [device for device in numbers if not 0 <= device < count]
    if missing:
        logger.warning("max_memory names accelerators %s, but this machine has %d", missing, count)
    order = [*numbers, *(device for device in ("mps", "cpu", "disk") if device in max_memory)]
    return {device: int(max_memory[device]) for device in order}


def _free_memory() -> Budget:
    free: Budget = {}
    kind = accelerator_type()
    shared = False
    if kind == "mps":
        return {"mps": available_host_memory()}
    for index in range(torch.accelerator.device_count()) if kind else ():
        module = torch.get_device_module(kind)
        try:
            free[index] = int(module.mem_get_info(index)[0])
        except (RuntimeError, AttributeError) as error:
            logger.info("%s:%d does not report its free memory: %s", kind, index, str(error).partition("\n")[0])
            continue
        properties = module.get_device_properties(index)
        shared = shared or bool(getattr(properties, "is_integrated", False))
    if not shared:  # an integrated accelerator's memory is the host's: it would count twice
        free["cpu"] = available_host_memory()
    return free


def get_module_leaves(module_sizes: Mapping[str, int | float]) -> list[str]:
    """Return the names in ``module_sizes`` that have no other name there below them."""
    parents = {name.rpartition(".")[0] for name in module_sizes}
    return [name for name in module_sizes if name and name not in parents]


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
    low_zero: bool = False,
) -> Budget:
    """Return the ``max_memory`` with which `infer_auto_device_map` fills all accelerators about equally.

    Each except the last gets its share of the model and room for one more block. ``low_zero`` leaves accelerator
    0 as empty as the others allow. With one accelerator and no ``max_memory``, a tenth of it stays free.
    """
    budget = get_max_memory(max_memory)
    kind = accelerator_type() or "cuda"
    usable = [device for device, size in budget.items() if size > 0 and _is_accelerator(device, kind)]
    if not usable:
        return budget
    numbers = sorted(device for device in usable if isinstance(device, int))
    if len(usable) == 1:
        low_zero = False
        if max_memory is None and numbers:
            budget[numbers[0]] = int(budget[numbers[0]] * _FOR_WEIGHTS)
    sizes = compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes)
    share = int(sizes[""] // (len(usable) - 1 if low_zero else len(usable)))
    share += _reserve(model, sizes, class_names(no_split_module_classes))
    for device in numbers[:-1]:
        if not (low_zero and device == 0):
            budget[device] = min(share, budget[device])
    if low_zero and 0 in budget:
        others = sum(budget[device] for device in numbers if device != 0)
        budget[0] = min(max(0, int(sizes[""]) - others), budget[0])
    return budget


def _is_accelerator(device: int | str, kind: str) -> bool:
    return isinstance(device, int) or device == kind


def _reserve(model: nn.Module, sizes: Mapping[str, int | float], no_split: Collection[str]) -> int:
    """Return 1.25 times the size of the largest unsplittable block, or of the mean layer if that is larger."""
    modules = {name for name, _ in model.named_modules()}
    blocks = [sizes.get(name, 0) for name, module in model.named_modules() if name and _is_one_of(module, no_split)]
    layers = get_module_leaves({name: size for name, size in sizes.items() if name in modules})
    mean = int(sum(sizes[name] for name in layers) / max(len(layers), 1))
    return int(1.25 * max([mean, *blocks]))


def _is_one_of(module: nn.Module, classes: Iterable[str]) -> bool:
    return type(module).__name__ in classes
