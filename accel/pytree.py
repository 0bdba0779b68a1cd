"""Operations on nested data: dicts, lists, tuples, named tuples, dataclasses, mappings. Types are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch


def is_namedtuple(data: object) -> bool:
    """Return True if ``data`` is an instance of a named tuple class."""
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")


def is_record(value: object) -> bool:
    """Return True if ``value`` is an instance (not the class) of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def honor_type(obj: Any, generator: Iterator[Any]) -> Any:
    """Build a list or tuple of the type of ``obj`` from ``generator``; a named tuple gets one argument per field."""
    if is_namedtuple(obj):
        return type(obj)(*generator)
    return type(obj)(generator)


def map_nested(function: Callable[[Any], Any], data: Any) -> Any:
    """Apply ``function`` to every leaf of ``data`` and return nested data of the same structure and types."""
    items = children(data)
    if items is None:
        return function(data)
    return rebuild(data, {key: map_nested(function, item) for key, item in items.items()})


def children(data: Any) -> dict[Any, Any] | None:
    """Return the items of nested data by index, key or field; ``None`` for a leaf."""
    if isinstance(data, torch.Tensor):
        return None
    if isinstance(data, (list, tuple)):
        return dict(enumerate(data))
    if isinstance(data, Mapping):
        return dict(data)
    return dict(fields_of(data)) if is_record(data) else None


def rebuild(original: Any, items: dict[Any, Any]) -> Any:
    """Return nested data of the type of ``original`` with ``items`` in place of its `children`."""
    if isinstance(original, Mapping):
        return rebuild_mapping(original, items)
    return dataclasses.replace(original, **items) if is_record(original) else honor_type(original, iter(items.values()))


def rebuild_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Return ``items`` as a mapping of the type of ``original``, with the same factory if it has one."""
    if type(original) is dict:
        return items
    factory = getattr(original, "default_factory", None)
    if factory is not None:
        return type(original)(factory, items)  # type: ignore[call-arg]
    return type(original)(items)  # type: ignore[call-arg]


def fields_of(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each constructor field of the dataclass instance ``record``."""
    for field in dataclasses.fields(record):
        if field.init:
            yield field.name, getattr(record, field.name)


def leaves(data: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its path, such as ``['labels'][0]``, in the order in which `map_nested` visits them."""
    items = children(data)
    if items is None:
        yield path, data
        return
    by_field = is_record(data) and not isinstance(data, Mapping)
    for key, item in items.items():
        yield from leaves(item, f"{path}.{key}" if by_field else f"{path}[{key!r}]")


def collect(data: Any, collected: list[Any]) -> None:
    """Append every leaf of ``data`` to ``collected``, in the order of `leaves`; faster, without paths."""
    kind = type(data)
    if kind is dict or kind is list or kind is tuple:
        for item in data.values() if kind is dict else data:
            if type(item) is torch.Tensor:
                collected.append(item)
            else:
                collect(item, collected)
    else:
        items = children(data)
        if items is None:
            collected.append(data)
        else:
            for item in items.values():
                collect(item, collected)


def tensors(data: Any) -> list[torch.Tensor]:
    """Return every tensor in ``data``, in order."""
    collected: list[Any] = []
    collect(data, collected)
    return [leaf for leaf in collected if isinstance(leaf, torch.Tensor)]


def replace_tensors(data: Any, values: list[torch.Tensor]) -> Any:
    """Return ``data`` with its tensors replaced, in order, by ``values``; other leaves stay."""
    return _fill(data, iter(values))


def _fill(data: Any, values: Iterator[torch.Tensor]) -> Any:
    kind = type(data)
    if kind is torch.Tensor:
        return next(values)
    if kind is dict:
        return {key: _fill(item, values) for key, item in data.items()}
    if kind is list:
        return [_fill(item, values) for item in data]
    return map_nested(lambda leaf: next(values) if isinstance(leaf, torch.Tensor) else leaf, data)


def split_tensors(data: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split nested data into an outline and its dense tensors, by their paths (see `leaves`).

    The outline is ``data`` with a tensor on the meta device in place of each, and can be pickled; see `join_tensors`.
    """

    def outline(leaf: Any) -> Any:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if _is_dense(leaf) else leaf

    return map_nested(outline, data), {path: leaf for path, leaf in leaves(data) if _is_dense(leaf)}


def join_tensors(outline: Any, values: Mapping[str, Any]) -> Any:
    """Return ``outline``, by `split_tensors`, with the values of each path in place of tensors on the meta device."""
    ordered = iter([values[path] for path in meta_tensors(outline)])
    return map_nested(lambda leaf: next(ordered) if _is_dense(leaf) and leaf.is_meta else leaf, outline)


def meta_tensors(outline: Any) -> dict[str, torch.Tensor]:
    """Return the tensors on the meta device in ``outline``, by path."""
    return {path: leaf for path, leaf in leaves(outline) if _is_dense(leaf) and leaf.is_meta}


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> Any:
    """Return nested data with everything that has a ``to`` method moved to ``device``; other leaves stay.

    Entries of a mapping under ``skip_keys`` stay where they are. A leaf whose ``to`` does not accept
    ``non_blocking`` is moved without it.
    """
    skipped = (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys or ())
    return _send(tensor, device, non_blocking, skipped)


def _send(data: Any, device: torch.device | str | int, non_blocking: bool, skipped: tuple[str, ...]) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    # Packed sequences and batches of a tokenizer are tuples and mappings too, but know themselves how to move.
    if hasattr(data, "to"):
        return _move(data, device, non_blocking)
    items = children(data)
    if items is None:
        return data
    excluded = skipped if isinstance(data, Mapping) else ()
    return rebuild(data, {k: v if k in excluded else _send(v, device, non_blocking, skipped) for k, v in items.items()})


def _move(leaf: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    if not non_blocking:
        return leaf.to(device)
    try:
        return leaf.to(device, non_blocking=True)
    except TypeError:
        return leaf.to(device)


def find_batch_size(data: Any) -> int | None:
    """Return the size of the first dimension of the first tensor that has one, or ``None``."""
    for leaf in tensors(data):
        if leaf.ndim > 0:
            return leaf.shape[0]
    return None


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return ``data`` with every tensor replaced by its rows ``tensor_slice``; tensors without dimensions stay.

    ``process_index`` and ``num_processes`` are ignored; they give this function the signature of others.
    """
    return map_nested(lambda leaf: leaf[tensor_slice] if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf, data)
