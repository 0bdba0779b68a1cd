"""`--tee`: a copy of the ranks' log files in the launcher's output, each line prefixed with its rank."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable

from .errors import LaunchConfigError

_INTERVAL_S = 0.05
_CHUNK = 1 << 20
_MAX_LINE = 1 << 20  # bytes of an incomplete line that are buffered
# In a pod, marks a break in a long line before another rank's line: the Kubernetes target removes mark and newline.
_CONTINUATION = b"\x1f\n"


class Tee:
    """A follower of each attempt's log files. Does nothing for spec `0` or without log files."""

    def __init__(self, spec: str, log_dir: str | None) -> None:
        self._streams_by_rank = parse(spec) if log_dir else {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, logs: Iterable[tuple[int, int, str | None]]) -> None:
        """Switch to these (local rank, rank, path) files after printing the last attempt's to their end."""
        self.close()
        output = _Output()
        files = [
            _Followed(path, b"[rank %d] " % rank, output)
            for local, rank, path in logs
            if path and self._streams_by_rank.get(local, self._streams_by_rank.get(None, 0))
        ]
        if files:
            self._end.clear()
            self._thread = threading.Thread(target=self._run, args=(files,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Print the rest and stop, so that no output follows a report."""
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self._thread = None

    def _run(self, files: list[_Followed]) -> None:
        while not self._end.wait(_INTERVAL_S):
            for file in files:
                file.print_new()
        for file in files:
            file.print_new()
            file.print_rest()


class _Output:
    """Standard output, and the file whose last line there is incomplete."""

    def __init__(self) -> None:
        self._incomplete: _Followed | None = None
        self._break = _CONTINUATION if "ACCEL_POD_UID" in os.environ else b"\n"

    def is_continuation(self, file: _Followed) -> bool:
        """Return True if the next output continues an incomplete line of that file."""
        return self._incomplete is file

    def print(self, file: _Followed, data: bytes) -> None:
        if self._incomplete not in (None, file):
            data = self._break + data
        self._incomplete = None if data.endswith(b"\n") else file
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            sys.stdout.flush()
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(1, remaining) :]


class _Followed:
    """A growing file, printed in complete lines, long ones in pieces."""

    def __init__(self, path: str, prefix: bytes, output: _Output) -> None:
        self._path, self._prefix, self._output = path, prefix, output
        self._position = 0
        self._rest = b""

    def print_new(self) -> None:
        """Print the lines completed since the last call, and the first piece of one that is too long."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb", buffering=0) as file:
            file.seek(self._position)
            while data := file.read(_CHUNK):
                self._position += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if lines:
                    self._print(b"".join(self._prefix + line + b"\n" for line in lines))
                if len(self._rest) > _MAX_LINE:
                    position = _cut_at(self._rest)
                    self._print(self._prefix + self._rest[:position])
                    self._rest = self._rest[position:]

    def print_rest(self) -> None:
        """Print an incomplete last line."""
        if self._rest or self._output.is_continuation(self):
            self._print(self._prefix + self._rest + b"\n")

    def _print(self, data: bytes) -> None:
        offset = len(self._prefix) if self._output.is_continuation(self) else 0
        self._output.print(self, data[offset:])


def _cut_at(line: bytes) -> int:
    """Return the end of a long line's first piece: between characters if it is UTF-8."""
    return next((index for index in range(_MAX_LINE, _MAX_LINE - 4, -1) if line[index] & 0xC0 != 0x80), _MAX_LINE)


def parse(spec: str) -> dict[int | None, int]:
    """Parse `3` for all ranks or `0:3,1:1` for some local ranks. Raises LaunchConfigError.

    A number selects the streams that torchrun would tee, stdout (1) and stderr (2), which are one stream here.
    """
    try:
        if ":" not in spec:
            streams: dict[int | None, int] = {None: int(spec)}
        else:
            pairs = (pair.split(":") for pair in spec.split(","))
            streams = {int(local): int(value) for local, value in pairs}
    except ValueError:
        streams = {None: -1}
    if any(value not in range(4) for value in streams.values()):
        raise LaunchConfigError(f"--tee takes 0 to 3, or LOCAL_RANK:N pairs with commas between them, not {spec!r}")
    return streams
