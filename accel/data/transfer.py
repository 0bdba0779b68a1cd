"""Transfer of batches from the main process to others, point to point: a scatter needs parts of one size.

A message is a header, a pickled object, and the bytes of its tensors. The header has the size of the next message for
the same process, so that a round takes one transfer; a header alone precedes the first message of an epoch.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from typing import Any

import torch
import torch.distributed as dist

from accel.state import PartialState
from accel.world.process_group import new_group

_ALIGNMENT = 16
_HEADER = 32  # bytes: four integers
_TAG = 7_015  # a tag that a script's own messages are unlikely to have

_group: Any = None


def host_group() -> Any:
    """Return a gloo group of all processes, ``None`` if the default group has gloo. All processes must call it."""
    global _group
    if not PartialState().use_distributed or "gloo" in str(PartialState().backend):
        return None
    if _group is None or not _is_alive(_group):
        _group = new_group(backend="gloo")
    return _group


def _is_alive(group: Any) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):
        return False


class _Pickler(pickle.Pickler):
    """A pickler that keeps type, shape and place of each tensor, and lists the tensors."""

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.end = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        start, self.end = self.end, self.end + _aligned(value.nbytes)
        self.tensors.append(value)
        return value.dtype, tuple(value.shape), start


class _Unpickler(pickle.Unpickler):
    """The inverse of `_Pickler`; tensors are views of ``data``."""

    def __init__(self, file: BytesIO, data: torch.Tensor) -> None:
        super().__init__(file)
        self._data = data

    def persistent_load(self, place: Any) -> torch.Tensor:
        return _view(self._data, *place)


def _view(data: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> torch.Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    return data[start : start + size].view(dtype).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def encode(value: Any) -> torch.Tensor:
    """Return a message with ``value``, of any type that can be pickled."""
    file = BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    pickled = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
    start = _HEADER + _aligned(len(pickled))
    message = torch.empty(start + pickler.end, dtype=torch.uint8)
    message[:_HEADER].view(torch.int64)[0] = start
    message[_HEADER : _HEADER + len(pickled)] = pickled
    for tensor in pickler.tensors:
        _view(message, tensor.dtype, tuple(tensor.shape), start).copy_(tensor.detach())
        start += _aligned(tensor.nbytes)
    return message


def decode(message: torch.Tensor) -> Any:
    """Return the value in ``message``; its tensors are views of the message's memory."""
    start = int(message[:_HEADER].view(torch.int64)[0])
    return _Unpickler(BytesIO(message[_HEADER:start].numpy().tobytes()), message[start:]).load()


class Sender:
    """The main process's end: sends the other processes their messages, without waiting for their arrival."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def open(self, ranks: Iterable[int], first: Mapping[int, torch.Tensor]) -> None:
        """Announce the ``first`` messages to ``ranks``."""
        self.send({rank: torch.zeros(_HEADER, dtype=torch.uint8) for rank in ranks}, first, None)

    def send(
        self, messages: Mapping[int, torch.Tensor], following: Mapping[int, torch.Tensor], remaining: int | None
    ) -> None:
        """Send each process its message, with the size of the following one.

        ``remaining``: rounds from this one on, if known.
        """
        self.wait_sent()
        for rank, message in messages.items():
            header = message[:_HEADER].view(torch.int64)
            header[1] = len(following[rank]) if rank in following else 0
            header[2] = -1 if remaining is None else remaining
            self._in_flight.append((dist.isend(message, rank, self._group, _TAG), message))

    def wait_sent(self) -> None:
        """Wait until everything sent has been received."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()


class Receiver:
    """Another process's end: iterates over the values in its messages of one epoch.

    ``at_end``: True if the latest message was the last one.
    ``remaining``: rounds from the latest one on, if known.
    """

    def __init__(self, group: Any, *, pinned: bool) -> None:
        self._group = group
        self._pinned = pinned
        self._next = _HEADER
        self._receive()

    def _receive(self) -> torch.Tensor:
        message = torch.empty(self._next, dtype=torch.uint8, pin_memory=self._pinned)
        dist.recv(message, 0, self._group, _TAG)
        _, self._next, remaining, _ = message[:_HEADER].view(torch.int64).tolist()
        self.at_end = self._next == 0
        self.remaining = 1 if self.at_end else None if remaining < 0 else remaining
        return message

    def __iter__(self) -> Iterator[Any]:
        while not self.at_end:
            yield decode(self._receive())
