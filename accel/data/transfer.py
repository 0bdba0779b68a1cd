"""Transfer of batches from the main process to others as bytes; the structure is sent only when it changes.

A message holds a header of eight integers, the pickled structure (if it differs from the previous message's)
and note, and the tensors one after another. The first message of an epoch holds only the size of the second;
each one after that holds the size of the next, so that a round takes one transfer per process.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from accel.pytree import map_nested
from accel.state import PartialState

_HEADER = 8
_HEADER_BYTES = 8 * _HEADER
_ALIGNED = 16
_TAG = 7_015  # a tag that a script's own messages are unlikely to have

_group: Any = None


class Slot:
    """A placeholder for a tensor in the structure of a batch."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape

    def __reduce__(self) -> Any:
        return Slot, (self.dtype, self.shape)


def host_group() -> Any:
    """Return a gloo group of all processes, ``None`` if the default group has gloo. All processes must call it."""
    global _group
    if not PartialState().use_distributed or "gloo" in str(PartialState().backend):
        return None
    if _group is None or not _is_alive(_group):
        _group = dist.new_group(backend="gloo")
    return _group


def _is_alive(group: Any) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):
        return False


class Encoder:
    """An encoder of one process's batches as messages; it remembers the structure sent last."""

    def __init__(self) -> None:
        self._sent: bytes | None = None

    def encode(self, batch: Any, note: Any) -> torch.Tensor:
        """Return the message with ``batch`` and ``note`` (small and picklable, or ``None``)."""
        tensors: list[torch.Tensor] = []

        def lift(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                return leaf
            tensors.append(leaf)
            return Slot(leaf.dtype, tuple(leaf.shape))

        structure = pickle.dumps(map_nested(lift, batch), protocol=5)
        changed = structure != self._sent
        header = (
            b"" if note is None and not changed else pickle.dumps((structure if changed else None, note), protocol=5)
        )
        self._sent = structure
        return _pack(header, tensors)


def _pack(header: bytes, tensors: list[torch.Tensor]) -> torch.Tensor:
    end = _aligned(_HEADER_BYTES + len(header))
    message = torch.empty(end + sum(_aligned(t.nbytes) for t in tensors), dtype=torch.uint8)
    message[:_HEADER_BYTES] = 0
    message[:_HEADER_BYTES].view(torch.int64)[1] = len(header)
    if header:
        message[_HEADER_BYTES : _HEADER_BYTES + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for tensor in tensors:
        start, end = end, end + _aligned(tensor.nbytes)
        if tensor.numel():
            payload = message[start : start + tensor.nbytes].view(tensor.dtype)
            payload.view(tensor.shape).copy_(tensor.detach())
    return message


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Decoder:
    """A decoder of messages into batches; it remembers the latest structure."""

    def __init__(self) -> None:
        self._structure: Any = None

    def decode(self, message: torch.Tensor) -> tuple[Any, Any]:
        """Return the batch and the note of ``message``; tensors are views of its memory."""
        length = int(message[:_HEADER_BYTES].view(torch.int64)[1])
        note = None
        if length:
            structure, note = pickle.loads(message[_HEADER_BYTES : _HEADER_BYTES + length].numpy().tobytes())
            if structure is not None:
                self._structure = pickle.loads(structure)
        end = _aligned(_HEADER_BYTES + length)

        def fill(leaf: Any) -> Any:
            nonlocal end
            if not isinstance(leaf, Slot):
                return leaf
            size = leaf.dtype.itemsize
            for dimension in leaf.shape:
                size *= dimension
            start, end = end, end + _aligned(size)
            return message[start : start + size].view(leaf.dtype).view(leaf.shape)

        return map_nested(fill, self._structure), note


class Sender:
    """The main process's end: sends the other processes their messages, without waiting for arrival."""

    def __init__(self, processes: int, group: Any) -> None:
        self._processes = processes
        self._group = group
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def open(self, sizes: list[int]) -> None:
        """Send the sizes of the first messages: ``sizes[r]`` bytes for process r, 0 for no message."""
        self._send([torch.tensor([size]) for size in sizes])

    def send(self, messages: Sequence[torch.Tensor | None], following: list[int], remaining: int | None) -> None:
        """Send ``messages[r]`` to process r (``None``: nothing), with the sizes of the following ones.

        ``remaining``: rounds from this one on, if known.
        """
        for message, size in zip(messages, following, strict=True):
            if message is not None:
                header = message[:_HEADER_BYTES].view(torch.int64)
                header[0], header[2] = size, -1 if remaining is None else remaining
        self._send(messages)

    def _send(self, messages: Sequence[torch.Tensor | None]) -> None:
        self.wait_sent()
        for rank in range(1, self._processes):
            message = messages[rank]
            if message is not None:
                self._in_flight.append((dist.isend(message, rank, self._group, _TAG), message))

    def wait_sent(self) -> None:
        """Wait until everything sent has been received."""
        for work, _ in self._in_flight:
            work.wait()
        self._in_flight.clear()


class Receiver:
    """Another process's end: receives its messages. ``remaining``: rounds from the received one on, if known."""

    def __init__(self, group: Any, *, pinned: bool) -> None:
        self._group = group
        self._pinned = pinned
        self._decoder = Decoder()
        self._next = 0
        self.remaining: int | None = None

    @property
    def at_end(self) -> bool:
        """True if the message received last was the last one."""
        return self._next == 0

    def open(self) -> None:
        """Receive the size of the first message."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, 0, self._group, _TAG)
        self._next = int(size)

    def receive(self) -> tuple[Any, Any]:
        """Receive the next batch and its note."""
        message = torch.empty(self._next, dtype=torch.uint8, pin_memory=self._pinned)
        dist.recv(message, 0, self._group, _TAG)
        header = message[:_HEADER_BYTES].view(torch.int64).tolist()
        self._next = header[0]
        self.remaining = None if header[2] < 0 else header[2]
        return self._decoder.decode(message)
