"""Commands that need torch, where it may be missing or broken."""

from __future__ import annotations

from .output import note


def has_torch(command: str) -> bool:
    """Whether torch can be imported; if not, a line on stderr says why and what to install."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "torch":
            note(f"{command}: needs torch: pip install accel-launch[train]")
            return False
        why = f"{error}"
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    else:
        return True
    note(f"{command}: needs torch, which cannot be imported: {why}")
    return False
