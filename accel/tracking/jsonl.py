"""A tracker without dependencies: ``<logging_dir>/<run_name>/metrics.jsonl``, appended one JSON object a line.

Every line has ``run``, ``kind`` and ``time`` (seconds since 1970). Kinds: ``start`` (``schema``, ``project``,
``rank``, ``processes``, ``attempt``), ``config`` (``config``), ``log`` (``step``, ``values``) and ``end``.
JSON has no infinities and no NaN: such a number is ``null``, and the line's ``nonfinite`` has its value by
JSON pointer: ``"nonfinite": {"/loss": "nan"}``.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from accel.errors import ArgumentError, TrackerError
from accel.tracking.base import GeneralTracker, on_main_process, plain, scalar

logger = logging.getLogger(__name__)

SCHEMA = 1
FILE = "metrics.jsonl"
# Characters that some readers, such as `str.splitlines`, take for the end of a line; JSON itself escapes the others.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class JSONLTracker(GeneralTracker):
    """A tracker that writes records to a file, which can be read during the run.

    ``run_id``: joins this run to an earlier one in the same file. Default: the job's id under `accel submit` (all
        attempts of a job are one run), else a new id.
    ``every_rank``: each process writes, rank 0 to ``metrics.jsonl`` and rank N to ``metrics.N.jsonl``.
    ``sync_every``: seconds between fsyncs; ``None``: only at the end.

    A record is one unbuffered write of one line: a killed process loses no record for which `log` has returned, a
    crashed machine those of the last ``sync_every`` seconds. Earlier lines are never rewritten. A line cut short,
    by a full disk or a kill, affects no other line.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(
        self,
        run_name: str,
        logging_dir: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        every_rank: bool = False,
        sync_every: float | None = 30.0,
    ) -> None:
        super().__init__()
        self.run_name = run_name
        self.run_id = run_id or os.environ.get("ACCEL_JOB_ID") or uuid4().hex[:12]
        self.main_process_only = not every_rank
        self.sync_every = sync_every
        self.directory = Path(logging_dir) / run_name
        self._file: _Lines | None = None

    @property
    def tracker(self) -> Path:
        """The file that this process writes."""
        rank = _rank()
        return self.directory / (f"metrics.{rank}.jsonl" if rank and not self.main_process_only else FILE)

    @on_main_process
    def start(self) -> None:
        """Open the file, creating it if needed, and write the first line of an attempt."""
        from accel.state import PartialState

        self.directory.mkdir(parents=True, exist_ok=True)
        self._file = _Lines(self.tracker, self.sync_every)
        state = PartialState()
        self._write(
            "start",
            schema=SCHEMA,
            project=self.run_name,
            rank=state.process_index,
            processes=state.num_processes,
            attempt=int(os.environ.get("ACCEL_ATTEMPT") or 0),
        )

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write ``values`` as the run's configuration; values without a JSON type are written as their ``str``."""
        self._write("config", config=values)
        self._lines.sync()

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write ``values`` as one line. Tensors and arrays become numbers or lists, exact to the bit.

        Raises `OSError` if the line was not written completely, and `ArgumentError` for any ``kwargs``.
        """
        if kwargs:
            raise ArgumentError(f"tracker 'jsonl' takes no log_kwargs, got {', '.join(kwargs)}")
        self._write("log", step=scalar(step), values=values)

    @on_main_process
    def finish(self) -> None:
        """Write the last line of the run, fsync and close the file."""
        if self._file is None:
            return
        try:
            self._write("end")
            self._file.sync()
        finally:
            self._file.close()
            self._file = None

    @property
    def _lines(self) -> _Lines:
        if self._file is None:
            raise TrackerError("tracker 'jsonl' is not open: use it between start() and finish()")
        return self._file

    def _write(self, kind: str, **content: Any) -> None:
        self._lines.write(_encode({"run": self.run_id, "kind": kind, "time": time.time(), **content}))


class _Lines:
    """A file for appending lines, each in one write; it tracks whether its last line is complete."""

    def __init__(self, path: Path, sync_every: float | None) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"
        self._sync_every = math.inf if sync_every is None else sync_every
        self._synced = time.monotonic()

    def write(self, line: bytes) -> None:
        data = b"\n" + line if self._torn else line
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        finally:
            if written:
                self._torn = data[written - 1] != ord("\n")
        if time.monotonic() - self._synced >= self._sync_every:
            self.sync()

    def sync(self) -> None:
        self._synced = time.monotonic()
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield every complete record of a file in order, with its infinities and NaN restored.

    The file may still be written to: an incomplete last line is skipped. A damaged line is skipped with a warning
    that has its number.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield _restore(record)
            else:
                logger.warning("%s: skipped line %d, which is damaged", os.fspath(path), number)


def read_history(path: str | os.PathLike[str], run: str | None = None) -> list[dict[str, Any]]:
    """Return the ``log`` records of one run (default: the last one started) as if it had never been interrupted.

    If a run restarted from an earlier step, records of its former attempts from that step on are omitted.
    """
    records = list(read_records(path))
    if run is None:
        run = next((r["run"] for r in reversed(records) if r["kind"] == "start"), None)
    history: list[dict[str, Any]] = []
    restarted = False
    for record in records:
        if record["run"] != run:
            continue
        if record["kind"] == "start":
            restarted = True
        elif record["kind"] == "log":
            if restarted and record["step"] is not None:
                history = [r for r in history if r["step"] is None or r["step"] < record["step"]]
                restarted = False
            history.append(record)
    return history


def _rank() -> int:
    from accel.state import PartialState

    return PartialState().process_index


def _encode(record: dict[str, Any]) -> bytes:
    nonfinite: dict[str, str] = {}
    content = {key: _finite(plain(value), "", nonfinite) for key, value in record.items()}
    if nonfinite:
        content["nonfinite"] = nonfinite
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_LINE_ENDS)
    # A lone surrogate (from an undecodable file name) becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any, pointer: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[pointer] = repr(value)
        return None
    if isinstance(value, dict):
        return {key: _finite(item, f"{pointer}/{_escaped(key)}", nonfinite) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item, f"{pointer}/{index}", nonfinite) for index, item in enumerate(value)]
    return value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _restore(record: dict[str, Any]) -> dict[str, Any]:
    for pointer, text in record.pop("nonfinite", {}).items():
        *path, last = [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]
        container: Any = record["config" if record["kind"] == "config" else "values"]
        for part in path:
            container = container[int(part) if isinstance(container, list) else part]
        container[int(last) if isinstance(container, list) else last] = float(text)
    return record
