"""Whether a job's program is there, asked where it will run: in its image, with its code, through its launcher."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys


def there(entry: str, program: str) -> bool:
    if entry == "script":
        return os.path.isfile(program)
    if entry == "command":
        return shutil.which(program) is not None
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(program) is not None
    except ImportError:  # of a package around it
        return False


def main(entry: str, program: str) -> str | None:
    """A line for what is lacking."""
    if not there(entry, program):
        return f"there is no {entry} {program} for a program that runs in {os.getcwd()}"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("accel-launch", "torch")]
    print(f"{', '.join(versions)}; the {entry} {program} is there", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
