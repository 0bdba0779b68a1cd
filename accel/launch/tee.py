"""`--tee`: the ranks' log files, followed to the launcher's own output with the rank before each line."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable

from .errors import Refused

_INTERVAL_S = 0.05
_CHUNK = 1 << 16


class Tee:
    """Follows the log files of one attempt after another. Does nothing for spec `0` or without log files."""

    def __init__(self, spec: str, log_dir: str | None) -> None:
        self._wanted = parse(spec) if log_dir else {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, logs: Iterable[tuple[int, int, str | None]]) -> None:
        """Goes on to these files, each with its local rank and its rank; the last attempt's are read to their ends."""
        self.close()
        files = [
            _Followed(path, b"[rank %d] " % rank)
            for local, rank, path in logs
            if path and self._wanted.get(local, self._wanted.get(None, 0))
        ]
        if files:
            self._end.clear()
            self._thread = threading.Thread(target=self._run, args=(files,), daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Prints what is left, so that nothing comes after a report."""
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


class _Followed:
    """A file that grows, and whose lines are handed on whole."""

    def __init__(self, path: str, prefix: bytes) -> None:
        self._path, self._prefix = path, prefix
        self._position = 0
        self._partial = b""

    def print_new(self) -> None:
        """Prints the lines that have been finished since the last call."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb", buffering=0) as file:
            file.seek(self._position)
            while data := file.read(_CHUNK):
                self._position += len(data)
                *whole, self._partial = (self._partial + data).split(b"\n")
                _print(b"".join(self._prefix + line + b"\n" for line in whole))

    def print_rest(self) -> None:
        """Prints a last line that nobody finished."""
        if self._partial:
            _print(self._prefix + self._partial + b"\n")


def _print(data: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        sys.stdout.flush()
        while data:
            data = data[os.write(1, data) :]


def parse(spec: str) -> dict[int | None, int]:
    """`3` for all ranks or `0:3,1:1` for some; a number says which of stdout (1) and stderr (2) torchrun would tee,
    which here are one stream. Raises Refused."""
    try:
        if ":" not in spec:
            streams: dict[int | None, int] = {None: int(spec)}
        else:
            pairs = (pair.split(":") for pair in spec.split(","))
            streams = {int(local): int(value) for local, value in pairs}
    except ValueError:
        streams = {None: -1}
    if any(value not in range(4) for value in streams.values()):
        raise Refused(f"--tee takes 0 to 3, or LOCAL_RANK:N pairs with commas between them, not {spec!r}")
    return streams
