"""`--tee`: the ranks' log files, followed to the launcher's own output with the rank before each line."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from .errors import LaunchError

_INTERVAL_S = 0.05


class Tee:
    """Follows the log files of one attempt after another. Does nothing for spec `0` or without log files."""

    def __init__(self, spec: str, log_dir: str | None) -> None:
        self._wanted = parse(spec) if log_dir else {}
        self._tail: TailLog | None = None

    def follow(self, logs: list[tuple[int, str | None]]) -> None:
        """Goes on to these files, one a local rank; the last attempt's are read to their ends first."""
        self.close()
        chosen = {local: path for local, path in logs if path and self._wanted.get(local, self._wanted.get(None, 0))}
        if chosen:
            prefixes = {local: f"[rank {_rank(path)}] " for local, path in chosen.items()}
            self._tail = TailLog("accel", chosen, sys.stdout, prefixes, interval_sec=_INTERVAL_S).start()

    def drain(self) -> None:
        """Prints what is left, so that nothing comes after a report."""
        self.close()

    def close(self) -> None:
        if self._tail is not None:
            self._tail.stop()
            self._tail = None
            sys.stdout.flush()


def parse(spec: str) -> dict[int | None, int]:
    """`3` for all ranks or `0:3,1:1` for some; a number says which of stdout (1) and stderr (2) torchrun would tee,
    which here are one stream. Raises LaunchError."""
    try:
        if ":" not in spec:
            streams: dict[int | None, int] = {None: int(spec)}
        else:
            pairs = (pair.split(":") for pair in spec.split(","))
            streams = {int(local): int(value) for local, value in pairs}
    except ValueError:
        streams = {None: -1}
    if any(value not in range(4) for value in streams.values()):
        raise LaunchError(f"--tee takes 0 to 3, or LOCAL_RANK:N pairs with commas between them, not {spec!r}")
    return streams


def _rank(path: str) -> str:
    return path.rpartition("/rank-")[2].partition(".")[0]
