"""Directories that tests make once for each user, and keep: environments and programs from package registries."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def directory(name: str, made_of: object, make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills, which is whole; another one for each value of `made_of`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "accel-tests")
    place = cache / f"{name}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "whole").exists():
            shutil.rmtree(place, ignore_errors=True)
            make(place)
            (place / "whole").touch()
    return place
