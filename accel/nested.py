"""Walking nests: dicts, lists, tuples, named tuples, dataclasses and mappings, whose types are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def is_namedtuple(value: object) -> bool:
    """Whether ``value`` is an instance of a named tuple class."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def is_record(value: object) -> bool:
    """Whether ``value`` is an instance (not the class) of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def honor_type(original: Any, items: Iterator[Any]) -> Any:
    """Build a list or tuple of the same type as ``original`` from ``items``; named tuples get one argument a field."""
    if is_namedtuple(original):
        return type(original)(*items)
    return type(original)(items)


def map_nested(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply ``function`` to every leaf of ``data`` and return a nest of the same shape and types."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, (list, tuple)):
        return honor_type(data, (map_nested(function, item) for item in data))
    if isinstance(data, Mapping):
        return _rebuild_mapping(data, {key: map_nested(function, item) for key, item in data.items()})
    if is_record(data):
        return dataclasses.replace(data, **{name: map_nested(function, item) for name, item in _fields(data)})
    return function(data)


def _rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    factory = getattr(original, "default_factory", None)
    if factory is not None:
        return type(original)(factory, items)  # type: ignore[call-arg]
    return type(original)(items)  # type: ignore[call-arg]


def _fields(record: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(record):
        if field.init:
            yield field.name, getattr(record, field.name)


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as ``['labels'][0]``, in the order in which `map_nested` visits them."""
    if isinstance(data, torch.Tensor):
        yield path, data
    elif isinstance(data, (list, tuple)):
        for index, item in enumerate(data):
            yield from leaves(item, f"{path}[{index}]")
    elif isinstance(data, Mapping):
        for key, item in data.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif is_record(data):
        for name, item in _fields(data):
            yield from leaves(item, f"{path}.{name}")
    else:
        yield path, data


def tensors(data: Any) -> list[torch.Tensor]:
    """Every tensor in ``data``, in order."""
    return [leaf for _, leaf in leaves(data) if isinstance(leaf, torch.Tensor)]


def replace_tensors(data: Any, values: list[torch.Tensor]) -> Any:
    """Return ``data`` with its tensors replaced, in order, by ``values``; other leaves stay."""
    supply = iter(values)
    return map_nested(lambda leaf: next(supply) if isinstance(leaf, torch.Tensor) else leaf, data)


def send_to_device(data: Any, device: torch.device | str | int, non_blocking: bool = False) -> Any:
    """Return ``data`` with everything that has a ``to`` method moved to ``device``; other leaves stay.

    A leaf whose ``to`` does not take ``non_blocking`` is moved without it.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        to = getattr(leaf, "to", None)
        return leaf if to is None else to(device)

    if not isinstance(data, torch.Tensor) and hasattr(data, "to"):
        return move(data)
    return map_nested(move, data)


def find_batch_size(data: Any) -> int | None:
    """The first dimension of the first tensor that has one, or ``None``."""
    for leaf in tensors(data):
        if leaf.ndim > 0:
            return leaf.shape[0]
    return None


def slice_tensors(data: Any, rows: slice) -> Any:
    """Return ``data`` with every tensor replaced by its ``rows``; tensors without dimensions stay."""
    return map_nested(lambda leaf: leaf[rows] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf, data)
