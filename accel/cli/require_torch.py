"""Checks for torch in commands that need it, since it may be missing or broken."""

from __future__ import annotations

import importlib.util
import sys


def torch_is_installed(command: str) -> bool:
    """Return True if torch is installed, without importing it; else print the remedy on stderr."""
    return importlib.util.find_spec("torch") is not None or _print_missing(command)


def has_torch(command: str) -> bool:
    """Import torch. If that fails, print the reason and the remedy on stderr and return False."""
    try:
        import torch  # noqa: F401
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return _print_missing(command)
        reason = f"{error}" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: {error}"
        print(f"{command}: torch cannot be imported: {' '.join(reason.splitlines())}", file=sys.stderr)
        return False
    return True


def _print_missing(command: str) -> bool:
    print(f"{command}: torch is not installed: pip install 'accel-launch[train]'", file=sys.stderr)
    return False
