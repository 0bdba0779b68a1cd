"""Files of tensors in the safetensors format, and files of objects: `torch.save` writes these."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.serialization import config

from accel.checkpoint.durable import Digest, DurableFile, write_durably
from accel.errors import AccelError, CheckpointError
from accel.parallel.shares import is_sharded
from accel.tensor_files import MAX_HEADER, TYPES, alias_metadata

_ALIGNMENT = 64  # as torch aligns memory


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    fetch: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Digest:
    """Write ``tensors`` as a safetensors file, one at a time, without a second copy of them all.

    Memory that several names share (tied weights) is written under the first; the header lists the others.
    ``fetch`` is called with each tensor in the order of `file_order`, and its result is written instead. Raises
    `CheckpointError` for tensors that the format cannot hold.
    """
    refuse_unsavable(tensors, path.name)
    unique, aliases = untie(tensors)
    offsets: dict[str, list[int]] = {}
    end = 0
    for name, tensor in file_order(unique).items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        offsets[name] = [start, end]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {}), **alias_metadata(aliases)}}
    for name, tensor in unique.items():
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise CheckpointError(
            f"{path.name}: the names and shapes of its {len(unique)} tensors take {len(text)} bytes, but safetensors "
            f"allows {MAX_HEADER}"
        )

    def fill(file: DurableFile) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in file_order(unique).values():
            elements = tensor if fetch is None else fetch(tensor)
            file.write_tensor(elements.detach().resolve_conj().resolve_neg().contiguous().reshape(-1))

    device = next((tensor.device for tensor in unique.values() if tensor.is_cuda), torch.device("cpu"))
    return write_durably(path, fill, device)


def file_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``tensors`` as they follow each other in a file: by falling element size, so that each is aligned.

    The format allows no gaps between them.
    """
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def fits_safetensors(value: Any) -> bool:
    """Return True for a dense tensor of a type that the format has; sharded ones count as such."""
    return isinstance(value, torch.Tensor) and (
        is_sharded(value) or (value.layout is torch.strided and value.dtype in TYPES)
    )


def split_dense(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a state dict into the tensors that safetensors can hold and the rest, such as sparse buffers."""
    tensors = {name: value for name, value in state.items() if fits_safetensors(value)}
    return tensors, {name: value for name, value in state.items() if name not in tensors}


def refuse_unsavable(
    state: Mapping[str, Any], source: str, remedy: str = "", error: type[AccelError] = CheckpointError
) -> None:
    """Raise ``error``, with ``source`` and ``remedy``, for a value in ``state`` that safetensors cannot hold."""
    for name, value in state.items():
        problem = _why_unsavable(value)
        if problem is not None:
            raise error(f"{source}: {name} is {problem}, which safetensors cannot hold{remedy}")


def _why_unsavable(value: Any) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
    wrapper = is_traceable_wrapper_subclass(value) and not is_sharded(value)
    good = value.dtype in TYPES and not value.is_meta and not wrapper
    return None if good else f"a {type(value).__name__} of {value.dtype} on {value.device}"


def untie(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors with each memory once, under its first name, and a map from every other name to it."""
    unique: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = identity(tensor)
        if tensor.numel() and key in first_names:
            aliases[name] = first_names[key]
        else:
            first_names[key] = name
            unique[name] = tensor
    return unique, aliases


def identity(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that are the same view of the same memory."""
    if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor)  # it has no memory, or several
    view = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), view


# Files of objects, which `accel.tensor_files.read_object` reads.


def write_bytes(path: Path, data: bytes) -> Digest:
    """Write ``data`` to a new file and flush it to the disk."""
    return write_durably(path, lambda file: file.write(data))


def write_object(path: Path, value: Any) -> Digest:
    """Write ``value``, of any type, with `torch.save`."""
    pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with config.patch("save.use_pinned_memory_for_d2h", pinned):  # type: ignore[attr-defined]
        return write_durably(path, lambda file: torch.save(value, file))  # type: ignore[arg-type]


def write_safe_object(path: Path, value: Any) -> Digest:
    """Write ``value`` so that `read_object` can read it.

    Raises `CheckpointError` for a type that `read_object` would refuse.
    """
    # The manifest has the file's checksums, so torch need not compute those of the zip format too.
    with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        digest = write_object(path, value)
    unsafe_globals = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if unsafe_globals:
        raise CheckpointError(
            f"{path.name} would hold {', '.join(sorted(set(unsafe_globals)))}, which cannot be loaded safely: "
            "keep tensors, numbers, strings, lists, tuples and dicts in a state_dict"
        )
    return digest


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a draft path next to ``path``, and rename it to ``path`` when the block ends.

    If the block fails the draft is deleted.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def numpy_types() -> list[Any]:
    """Return the types in a pickled NumPy array: numbers and dtypes, nothing that runs code."""
    core = numpy.__dict__.get("_core") or numpy.core
    kinds = [numpy.ndarray, numpy.dtype, core.multiarray._reconstruct, core.multiarray.scalar, codecs.encode]
    return kinds + [type(numpy.dtype(kind)) for kind in ("uint32", "int64", "float64")]
