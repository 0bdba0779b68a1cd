"""Files of tensors in the safetensors format (https://github.com/huggingface/safetensors, "Format"), and their loading.

Tensors are written directly from their memory and read as memory-mapped pages that can be evicted, so that
neither direction needs a second copy.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accel.checkpoint.durable import Digest, DurableFile, write_durably
from accel.errors import CheckpointError
from accel.parallel.shares import is_sharded
from accel.pytree import map_nested

T = TypeVar("T")

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_BY_NAME = {name: kind for kind, name in TYPES.items()}
_MAX_HEADER = 100_000_000  # the limit of safetensors' own reader
_ALIGNMENT = 64  # as torch aligns memory: the data can be used where they are mapped
_POPULATE_READ = 22  # MADV_POPULATE_READ, from Linux 5.14 on


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    fetch: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Digest:
    """Write ``tensors`` as a safetensors file, one at a time, without a second copy of them all.

    Memory that several names share (tied weights) is written under the first; the header lists the others.
    ``fetch`` is called with each tensor in the order of `file_order`, and its result is written instead.
    """
    unique, aliases = untie(tensors)
    offsets: dict[str, list[int]] = {}
    end = 0
    for name, tensor in file_order(unique).items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        offsets[name] = [start, end]
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {}), **aliases}}
    for name, tensor in unique.items():
        kind = _type_name(path, name, tensor)
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)

    def fill(file: DurableFile) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in file_order(unique).values():
            _write_elements(file, tensor if fetch is None else fetch(tensor))

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


def _write_elements(file: DurableFile, tensor: torch.Tensor) -> None:
    file.write_tensor(tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1))


def _type_name(path: Path, name: str, tensor: torch.Tensor) -> str:
    wrapper = is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor)
    if tensor.is_meta or wrapper or tensor.dtype not in TYPES:
        kind = f"a {type(tensor).__name__} of {tensor.dtype} on {tensor.device}"
        raise CheckpointError(f"{path.name}: {name} is {kind}, which safetensors cannot hold")
    return TYPES[tensor.dtype]


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
    if is_sharded(tensor):  # this process's part may be empty
        return id(tensor)
    view = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), view


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; tied names have the same tensor.

    The tensors are memory-mapped, read on access: see `evict`. Writes to them stay in memory. Raises
    `CheckpointError` for a damaged file.
    """
    return read_tensors_and_metadata(path)[0]


def read_tensors_and_metadata(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Do as `read_tensors`, and return the file's metadata too."""
    try:
        header, start = _read_header(path)
        metadata = header.pop("__metadata__", {})
        tensors = _map_tensors(path, header, start)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be loaded: {error}") from error
    for alias, name in metadata.items():
        if name in tensors:
            tensors.setdefault(alias, tensors[name])
    return tensors, metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError("its header does not fit into the file")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a table of tensors")
    return header, 8 + length


def _map_tensors(path: Path, header: Mapping[str, Any], start: int) -> dict[str, torch.Tensor]:
    size = path.stat().st_size
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=size)
    tensors: dict[str, torch.Tensor] = {}
    end = start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        kind, shape = _BY_NAME[entry["dtype"]], torch.Size(entry["shape"])
        first, stop = (start + offset for offset in entry["data_offsets"])
        if first != end or stop > size or stop - first != shape.numel() * kind.itemsize:
            raise ValueError(f"the offsets of {name} in its header do not match the file")
        tensors[name], end = _view(storage, first, stop, kind, shape), stop
    if end != size:
        raise ValueError(f"it has {size} bytes, but its header describes {end}")
    return {name: tensors[name] for name in header}


def _view(storage: Any, first: int, stop: int, kind: torch.dtype, shape: torch.Size) -> torch.Tensor:
    if first % kind.itemsize:  # other writers need not align tensors
        piece = torch.empty(0, dtype=torch.uint8).set_(storage, first, (stop - first,), (1,))
        return in_memory(piece.clone().view(kind).reshape(shape))
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=kind).set_(storage, first // kind.itemsize, shape, strides)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    function: Any = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function  # type: ignore[no-any-return]


# The addresses of tensors read from a file that are no memory maps: to evict them would clear memory of this process.
# An address that a memory map gets later only keeps its pages.
_in_memory: set[int] = set()


def in_memory(state: T) -> T:
    """Return ``state`` as it is; `evict` ignores the tensors in it from now on, as they are not memory-mapped."""

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            _in_memory.add(leaf.untyped_storage().data_ptr())
        return leaf

    map_nested(note, state)
    return state


def _advise(mapped: torch.Tensor, advice: int) -> None:
    advise = _madvise()
    if advise is None or mapped.layout is not torch.strided or not mapped.numel():
        return
    storage = mapped.untyped_storage()
    if storage.data_ptr() not in _in_memory:
        start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        # An expanded tensor has more elements than its storage.
        size = min(mapped.numel() * mapped.element_size(), storage.data_ptr() + storage.nbytes() - mapped.data_ptr())
        advise(start, mapped.data_ptr() + size - start, advice)


def prefetch(mapped: torch.Tensor) -> None:
    """Read the memory-mapped tensor into memory at once, where the system can; access alone does so page by page."""
    _advise(mapped, _POPULATE_READ)


def evict(mapped: torch.Tensor) -> None:
    """Evict the pages of a memory-mapped tensor from memory; the next access reads them again."""
    if sys.platform == "linux":
        _advise(mapped, mmap.MADV_DONTNEED)


# Loading a file's tensors into a run's objects piece by piece, without a second copy of the state.


def load_module(module: torch.nn.Module, state: dict[str, Any], **kwargs: Any) -> Any:
    """Call ``module.load_state_dict`` with a ``state`` of memory-mapped tensors.

    Each submodule's pages are read just before it is loaded and evicted afterwards: the extra memory is at most
    the size of the largest submodule.
    """
    if kwargs.get("assign"):
        state = {name: _cloned(value) for name, value in state.items()}  # parameters must not be memory-mapped
        return module.load_state_dict(state, **kwargs)
    pages = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    handles = []
    for prefix, part in module.named_modules():
        names = [f"{prefix}.{name}" if prefix else name for name in (*part._parameters, *part._buffers)]
        module_pages = [pages[name] for name in names if name in pages]
        if module_pages:
            handles.append(part.register_load_state_dict_pre_hook(_hook_for(prefetch, module_pages)))
            handles.append(part.register_load_state_dict_post_hook(_hook_for(evict, module_pages)))
    try:
        return module.load_state_dict(state, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _hook_for(action: Callable[[torch.Tensor], None], pages: list[torch.Tensor]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for tensor in pages:
            action(tensor)

    return hook


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
