"""A fast exit for a rank that will be started again, while its scheduler and users wait."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import stat
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Exit as multiprocessing's forked processes do: join threads, run exit handlers, flush open files.

    Skips the teardown of modules, which costs each rank 0.3 s with torch loaded.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush_files()
    finally:
        os._exit(code)


def _flush_files() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, io.IOBase)}
    for file in objects:
        if type(file) in kinds:
            with contextlib.suppress(Exception):  # closed, a full disk, or a class of the program's own
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe might never take it
                    file.flush()
    ctypes.CDLL(None).fflush(None)
