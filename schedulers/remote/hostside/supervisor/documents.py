"""JSON files that are whole whenever they are read."""

from __future__ import annotations

import json
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = 1


def write(path: str, document: dict[str, Any], sync: bool = False) -> None:
    """Writes JSON whole: a reader sees the old or the new."""
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump(document, file)
        file.flush()
        if sync:
            os.fsync(file.fileno())
    os.replace(partial, path)


def write_once(path: str, document: dict[str, Any]) -> None:
    """For how the job ended: a result that is there stays; one that cannot be written is tried again."""
    for _ in range(60):
        if os.path.exists(path):
            return
        try:
            write(path, document, sync=True)
        except OSError as error:
            print(f"{path}: {error.strerror}", file=sys.stderr, flush=True)
            time.sleep(1)
