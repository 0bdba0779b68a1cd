"""Files of tensors, in the safetensors format or by `torch.save`, whose tensors are read when they are copied.

https://github.com/huggingface/safetensors, "Format", describes the first.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import os
import struct
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel.errors import CheckpointError
from accel.host_memory import HostMemory
from accel.pytree import map_nested

# safetensors' name of a type → torch's. Older versions of torch lack some.
_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}
TYPES: Mapping[torch.dtype, str] = {getattr(torch, kind): name for name, kind in _NAMES.items() if hasattr(torch, kind)}
_BY_NAME = {name: kind for kind, name in TYPES.items()}
MAX_HEADER = 100_000_000  # the limit of safetensors' own reader
_ALIAS = "accel_alias:"

_MAX_READ = 1 << 30  # the system reads at most 2 GB a call


class Scratch:
    """Host memory for what cannot be read directly into its destination on ``device``, in pieces of ``size`` bytes.

    The pieces are used in turn: with two of them, pinned for a CUDA device, the copy of one overlaps the next read.
    """

    def __init__(self, device: torch.device, pieces: int, size: int) -> None:
        self.size = size
        self._pieces = [HostMemory(size, device) for _ in range(pieces)]
        self._copied: list[Any] = [None] * pieces  # an event after the last copy of each
        self._next = 0
        self._lock = threading.Lock()

    def copy(self, target: torch.Tensor, view: torch.Tensor, length: int, read: Callable[[torch.Tensor], None]) -> None:
        """Copy to ``target`` the ``length`` bytes that ``read`` fills in, in the type and layout of ``view``."""
        with self._lock:
            number, self._next = self._next, (self._next + 1) % len(self._pieces)
            if self._copied[number] is not None:
                self._copied[number].synchronize()
            piece = self._pieces[number].bytes[:length]
            read(piece)
            source = piece.view(view.dtype).as_strided(view.shape, view.stride())
            target.copy_(source, non_blocking=target.is_cuda)
            self._copied[number] = _event_on(target.device)


def _event_on(device: torch.device) -> Any:
    """Return an event that follows what was started on a CUDA ``device``; None for other devices, which wait."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@functools.cache
def _scratch(device: torch.device) -> Scratch:
    pieces = 2 if device.type == "cuda" else 1
    return Scratch(device, pieces, (16 << 20) // pieces)


@dataclass(frozen=True)
class _Source:
    """A file, and the state in which its header was read."""

    path: Path
    stamp: tuple[int, int, int]

    @contextmanager
    def open(self) -> Iterator[int]:
        """Yield a descriptor. Raises `CheckpointError` if the file has changed since, or cannot be read."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if stamp_of(os.fstat(file))[1:] != self.stamp[1:]:  # some network file systems renumber files
                    raise CheckpointError(f"{self.path} has changed while it was read")
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error


def stamp_of(stat: os.stat_result) -> tuple[int, int, int]:
    """Return what changes when a file is replaced or written."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


_T: Any = torch.Tensor
# What a stored tensor can do without reading the file.
_METADATA = {
    *(attribute.__get__ for attribute in (_T.shape, _T.dtype, _T.ndim, _T.layout, _T.requires_grad)),
    *(_T.size, _T.stride, _T.storage_offset, _T.dim, _T.numel, _T.element_size, _T.is_floating_point, _T.is_complex),
}


class StoredTensor(torch.Tensor):
    """A tensor in a file.

    ``destination.copy_(stored)`` reads the file directly into the destination, with the casts of
    `torch.Tensor.copy_`. At any other operation the tensor reads itself into memory, and is then as any tensor on the
    host. So code that takes tensors, such as a module's own way to load its state dict, need not know about it.
    """

    device = torch.device("cpu")
    is_meta = False
    _source: _Source
    _start: int
    _value: torch.Tensor | None = None

    @staticmethod
    def of(source: _Source, start: int, view: torch.Tensor) -> StoredTensor:
        """Create from ``view``, a meta tensor whose storage stands for the bytes from ``start`` on."""
        stored: StoredTensor = torch.Tensor._make_subclass(StoredTensor, view)
        stored._source, stored._start = source, start
        return stored

    @property
    def path(self) -> Path:
        """The file."""
        return self._source.path

    @property
    def offset(self) -> int:
        """The position of the first element in the file, in bytes."""
        return self._start + int(self.storage_offset()) * self.dtype.itemsize

    @property
    def _view(self) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(torch.Tensor)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        if function is torch.Tensor.copy_ and len(args) > 1 and _is_plain(args[0]) and args[0].shape == args[1].shape:
            args[1].read_into(args[0])
            return args[0]
        loaded = map_nested(lambda leaf: leaf.loaded() if isinstance(leaf, cls) else leaf, (args, kwargs or {}))
        return function(*loaded[0], **loaded[1])

    def loaded(self) -> torch.Tensor:
        """Return this tensor in memory, the same one at each call."""
        if self._value is None:
            self._value = self.read()
        return self._value

    def read(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a new tensor in memory. Raises `CheckpointError` for a file that has changed or cannot be read."""
        tensor = torch.empty_like(self._view, device=device, dtype=dtype)
        self.read_into(tensor)
        return tensor

    def read_into(self, destination: torch.Tensor) -> None:
        """Fill ``destination``, of the same shape, as `torch.Tensor.copy_` does. Raises `CheckpointError`."""
        if self._value is not None:
            destination.copy_(self._value)
        elif destination.numel():
            with self._source.open() as file:
                self._fill(file, destination.detach(), self._view)
            torch.autograd.graph.increment_version(destination)

    def _fill(self, file: int, target: torch.Tensor, view: torch.Tensor) -> None:
        size = view.dtype.itemsize
        start = self._start + int(view.storage_offset()) * size
        length = size * (1 + sum((count - 1) * stride for count, stride in zip(view.shape, view.stride(), strict=True)))
        if _is_memory(target, view.dtype) and view.is_contiguous():
            self._read(file, target.reshape(-1).view(torch.uint8), start)
        elif length <= (scratch := _scratch(target.device)).size:
            scratch.copy(target, view, length, lambda piece: self._read(file, piece, start))
        else:
            stride, dim = max((stride, dim) for dim, stride in enumerate(view.stride()) if view.shape[dim] > 1)
            row = length - size * (view.shape[dim] - 1) * stride
            rows = max(1, (scratch.size - row) // (size * stride) + 1)
            for first in range(0, view.shape[dim], rows):
                count = min(rows, view.shape[dim] - first)
                self._fill(file, target.narrow(dim, first, count), view.narrow(dim, first, count))

    def _read(self, file: int, target: torch.Tensor, start: int) -> None:
        data = memoryview(target.numpy().data)
        while data:
            count = os.preadv(file, [data[:_MAX_READ]], start)
            if not count:
                raise CheckpointError(f"{self.path} is truncated: {len(data)} bytes of a tensor are missing")
            data, start = data[count:], start + count


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _is_memory(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if the elements of ``tensor`` lie on the host as in a file of type ``dtype``."""
    flags = tensor.is_conj() or tensor.is_neg()
    return tensor.device.type == "cpu" and tensor.dtype == dtype and tensor.is_contiguous() and not flags


def cut(tensor: torch.Tensor, part: tuple[slice, ...]) -> torch.Tensor:
    """Return ``tensor[part]``: a stored tensor if ``tensor`` is one."""
    if isinstance(tensor, StoredTensor) and tensor._value is None:
        return StoredTensor.of(tensor._source, tensor._start, tensor._view[part])
    return tensor[part]


def read_all(data: Any) -> Any:
    """Return nested ``data`` with each stored tensor read into memory of its own."""
    return map_nested(lambda leaf: leaf.read() if isinstance(leaf, StoredTensor) else leaf, data)


# Files in the safetensors format.


class SafetensorsFile:
    """The tensors of a safetensors file by name, and its metadata. Names of a tied weight have the same tensor.

    ``aliases``: the other names of tied weights, and the names under which the file has them.

    Raises `CheckpointError` for a file that is missing, truncated or not a safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(MAX_HEADER, stat.st_size - 8):
                    raise CheckpointError(f"{self.path} is not a safetensors file, or is truncated")
                header = json.loads(file.read(length))
            self._source = _Source(self.path, stamp_of(stat))
            self.metadata: dict[str, str] = dict(header.pop("__metadata__", None) or {})
            self.tensors = self._located(header, 8 + length, stat.st_size)
            self.aliases = _aliases(self.metadata, self.tensors)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{self.path} is not a safetensors file: its header is damaged") from error
        self.tensors |= {alias: self.tensors[name] for alias, name in self.aliases.items()}

    def _located(self, header: Mapping[str, Any], start: int, size: int) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        end = start
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            kind, shape = _BY_NAME.get(entry["dtype"]), entry["shape"]
            if kind is None:
                raise CheckpointError(f"{self.path}: {name} is of type {entry['dtype']}, which torch does not have")
            first, stop = (start + operator.index(offset) for offset in entry["data_offsets"])
            if first != end or stop - first != math.prod(shape) * kind.itemsize:
                raise CheckpointError(f"{self.path} is damaged: the offsets of {name} in its header do not match")
            tensors[name] = StoredTensor.of(self._source, first, torch.empty(shape, dtype=kind, device="meta"))
            end = stop
        if end > size:
            raise CheckpointError(f"{self.path} is truncated: {end - size} bytes are missing at its end")
        if end < size:
            raise CheckpointError(f"{self.path} is damaged: it has {size} bytes, but its header describes {end}")
        return {name: tensors[name] for name in header}

    def changed(self) -> bool:
        """Return True if the file has changed since its header was read."""
        try:
            return stamp_of(os.stat(self.path)) != self._source.stamp
        except OSError:
            return True


def alias_metadata(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return metadata from which `SafetensorsFile` reads ``aliases`` (other name → name of a tensor)."""
    return {f"{_ALIAS}{alias}": name for alias, name in aliases.items()}


def _aliases(metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the aliases in ``metadata``; earlier versions of accel wrote no prefix."""
    named = {key: name for key, name in metadata.items() if key != "format" and name in tensors}
    return {key.removeprefix(_ALIAS): name for key, name in named.items() if key.removeprefix(_ALIAS) not in tensors}


def read_index(path: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index of shards names.

    Raises `CheckpointError` for another file, and for a file that is not in the folder of the index.
    """
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        names = index.get("weight_map", index)
        files = {str(name): path.parent / file for name, file in names.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} is not a checkpoint index: {error}") from error
    elsewhere = next((file for file in names.values() if os.path.basename(file) != file), None)
    if elsewhere is not None:
        raise CheckpointError(f"{path} names {elsewhere!r}, which is not in its folder")
    return files


# Files by `torch.save`. With ``weights_only=True``, no code in them runs.


def read_object(
    path: Path,
    *,
    stored: bool = False,
    part: tuple[int, int] | None = None,
    allowed: Iterable[Any] = (),
    **options: Any,
) -> Any:
    """Read a file by `torch.save`, its tensors on the CPU.

    ``stored``: return stored tensors, if the format of the file allows it (zip archives, not torch's older formats).
    ``part``: offset and length of the part of the file to read.
    ``allowed``: types that may be in the file besides torch's defaults.
    ``options``: further options of `torch.load`.

    Raises `CheckpointError` for a file that is missing, damaged, or holds other types.
    """
    try:
        with torch.serialization.safe_globals(list(allowed)), path.open("rb", buffering=0) as file:
            if stored:
                source = _Source(path, stamp_of(os.fstat(file.fileno())))
                with suppress(Exception):  # the plain way reports what is damaged
                    return _read_stored(_part_of(file, part), source, part[0] if part else 0, options)
            return torch.load(
                path if part is None else _part_of(file, part), map_location="cpu", weights_only=True, **options
            )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except MemoryError:
        raise
    except Exception as error:  # of torch's unpickler, for bytes that are no pickle or name types other than weights'
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be loaded as weights only: {reason}") from error


def _part_of(file: Any, part: tuple[int, int] | None) -> Any:
    if part is None:
        return file
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(file, *part)


def _read_stored(file: Any, source: _Source, base: int, options: Mapping[str, Any]) -> Any:
    """Load ``file``, which begins at the offset ``base`` of ``source``, with stored tensors, or raise any exception."""
    records = _records(file)
    file.seek(0)
    loaded = torch.load(file, map_location="meta", weights_only=True, mmap=False, **options)
    tensors: dict[Any, StoredTensor] = {}

    def store(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not _is_plain(leaf) or leaf.is_conj() or leaf.is_neg() or leaf.is_quantized:
            raise ValueError("it has no elements of its own in the file")
        storage = leaf.untyped_storage()
        # torch computes the offset from the order of the tensors: another archiver may have arranged them otherwise.
        start = getattr(storage, "_checkpoint_offset", None)
        if records.get(start, -1) < storage.nbytes():  # type: ignore[arg-type]
            raise ValueError("no record of the archive begins there")
        key = start, leaf.storage_offset(), leaf.dtype, leaf.shape, leaf.stride()
        return tensors.setdefault(key, StoredTensor.of(source, base + start, leaf.detach()))  # type: ignore[operator]

    return map_nested(store, loaded)


def _records(file: Any) -> dict[int, int]:
    """Map the offset of each uncompressed record of a zip archive to its length."""
    records: dict[int, int] = {}
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.compress_type == zipfile.ZIP_STORED:
                file.seek(record.header_offset + 26)  # the local header: 30 bytes, a name and extra data
                name, extra = struct.unpack("<HH", file.read(4))
                records[record.header_offset + 30 + name + extra] = record.file_size
    return records
