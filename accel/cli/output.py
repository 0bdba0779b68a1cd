"""Output of commands: JSON, tables, tab-separated lines, notes on stderr; and jobs as JSON or text.

Names and messages come from programs, hosts and servers, so all text except JSON (ASCII) goes through
`printable`: no terminal escape reaches the terminal. Only the lines of `accel logs` keep their bytes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from schedulers.printable import one_line, printable

if TYPE_CHECKING:
    from schedulers.job import Status
    from schedulers.store.record import Record


def note(text: str) -> None:
    """Print one line on stderr."""
    print(f"accel: {one_line(text)}", file=sys.stderr)


@contextlib.contextmanager
def progress() -> Iterator[None]:
    """Print progress messages of long operations in the block on stderr."""
    import logging

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(record.getMessage())

    logger, notes = logging.getLogger("schedulers.progress"), Notes()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(notes)
    try:
        yield
    finally:
        logger.removeHandler(notes)


def print_json(document: Any, *, one_line: bool = False) -> None:
    """Print one JSON document in ASCII, which neither the locale nor an argument of raw bytes can break.

    Values without a JSON type, such as a date from a YAML file, become text.
    """
    import json

    if one_line:
        print(json.dumps(document, separators=(",", ":"), default=str))
    else:
        print(json.dumps(document, indent=2, default=str))


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], *, on_terminal: Iterable[Sequence[str]]) -> None:
    """Print rows as tab-separated lines without a heading, or `on_terminal` as a table on a terminal."""
    if sys.stdout.isatty():
        _print_table(columns, [[printable(cell) for cell in row] for row in on_terminal])
        return
    for row in rows:
        print("\t".join(" ".join(printable(cell).split()) for cell in row))


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print `name   value` lines, skipping empty values; further lines of a value are indented under its first."""
    rows = [(printable(name), printable(value)) for name, value in fields if value]
    width = max((len(name) for name, _ in rows), default=0) + 2
    for name, value in rows:
        print(f"{name:<{width}}" + value.replace("\n", "\n" + " " * width))


def counted(count: int, noun: str, after: str = "") -> str:
    """Return `1 job`, `2 jobs`; `after` follows the noun: `2 snapshots of code`."""
    return f"{count:,} {noun}{'s' * (count != 1)}{after and ' ' + after}"


def moment(seconds: float) -> str:
    """Return a time since the epoch as ISO 8601 in UTC, to the second."""
    import time

    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def age(seconds: float) -> str:
    """Return a duration in its largest unit: `12 s`, `3 min`, `5 h`, `9 d`."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} s"


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    rows = list(rows)
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != columns[-1])
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    # A terminal that is too narrow breaks lines; rich would cut words and leave out whole columns.
    fixed_width = sum(max(map(cell_len, column)) + 2 for column in list(zip(columns, *rows, strict=True))[:-1])
    console.width = max(console.width, fixed_width + cell_len(columns[-1]))
    console.print(table)


# Jobs as JSON and as text. `list`, `status`, `wait`, `cancel` and `submit --follow --json` share the shape:
#
#     {"id", "name", "target", "kind", "nodes", "created_at", "native_id",
#      "state", "reason", "exit_code", "attempt", "message", "native_state", "observed_at", "warning"}
#
# A sagemaker job also has
# "details": {"secondary_status", "billable_seconds", "training_seconds", "spot_saving_percent"}.
#
# Times are seconds since the epoch. `state` is submitting, queued, running, succeeded, failed or cancelled;
# `unknown` if a newer accel wrote it.
# `warning` is why the state may be stale (its target could not be polled), else empty.


def record_json(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "target": record.target,
        "kind": record.kind,
        "nodes": record.nodes,
        "created_at": record.created_at,
        "native_id": record.native_id,
        **record.status.to_json(),
        "warning": record.warning,
        **({"owner": record.owner} if record.owner else {}),
    }


def outcome(job_id: str, status: Status) -> str:
    """Return `job 1a2b3c failed (exit code 3): ValueError: …`, in one line."""
    return f"job {job_id} {phrase(status)}"


def phrase(status: Status) -> str:
    """Return the state with its explanation: `failed (exit code 3): ValueError: …`."""
    reasons = []
    if status.state.value == "failed" and status.exit_code is not None:
        reasons.append(f"exit code {status.exit_code}")
    if status.reason.value not in ("none", "exit_code", "user"):
        reasons.append(status.reason.value.replace("_", " "))
    if status.attempt:
        reasons.append(f"attempt {status.attempt + 1}")
    details = f" ({', '.join(reasons)})" if reasons else ""
    message = "" if status.message == status.state.value else status.message  # cancelled: cancelled
    return f"{status.state.value}{details}" + (f": {message}" if message else "")
