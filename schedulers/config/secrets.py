"""Secrets by reference, `env:NAME` and `file:PATH`, for targets that resolve them at the submit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import SpecError

_KINDS = ("env", "file")


def check(secrets: Mapping[str, str], subject: str) -> None:
    """Raise SpecError for a reference of another kind. `subject`: the target, in words."""
    for name, reference in secrets.items():
        kind = reference.partition(":")[0]
        if kind not in _KINDS:
            raise SpecError(f"--secret {name}: {subject} reads env:NAME and file:PATH only")


def variables(secrets: Mapping[str, str]) -> set[str]:
    """Return the environment variables that hold secrets where the job is submitted."""
    return {
        variable for kind, _, variable in (reference.partition(":") for reference in secrets.values()) if kind == "env"
    }


def values(secrets: Mapping[str, str]) -> dict[str, str]:
    """Resolve the references on this machine. Raises SpecError, whose message never has a value."""
    return {name: _value(name, reference) for name, reference in secrets.items()}


def _value(name: str, reference: str) -> str:
    kind, _, location = reference.partition(":")
    if kind == "env":
        value = os.environ.get(location)
        if value is None:
            raise SpecError(f"secret {name}: {location} is not set where the job was submitted")
        return value
    try:
        return Path(location).expanduser().read_text().rstrip("\n")
    except (OSError, UnicodeDecodeError) as error:
        detail = getattr(error, "strerror", None) or "it is not text"
        raise SpecError(f"secret {name}: {location}: {detail}") from None
