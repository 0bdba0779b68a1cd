"""Comparison of installed versions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from accel.errors import ArgumentError, one_of

if TYPE_CHECKING:
    from packaging.version import Version

STR_OPERATION_TO_FUNC: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Return True if ``operation`` (such as ``">="``) holds between two versions.

    ``library_or_version`` is a version, or the name of an installed distribution. Raises `ArgumentError` for an
    unknown operation, and for a distribution that is not installed.
    """
    compare = STR_OPERATION_TO_FUNC[one_of(operation, STR_OPERATION_TO_FUNC, source="operation")]
    if isinstance(library_or_version, str):
        library_or_version = installed_version(library_or_version)
    return compare(library_or_version, parsed(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Call `compare_versions` for the installed torch."""
    return compare_versions("torch", operation, version)


@cache
def installed_version(distribution: str) -> Version:
    """Return the version of an installed distribution. Raises `ArgumentError` if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return parsed(version(distribution))
    except PackageNotFoundError:
        raise ArgumentError(f"{distribution} is not installed: pip install {distribution}") from None


@cache
def parsed(text: str) -> Version:
    """Parse a version. Raises `ArgumentError` for invalid text."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text)
    except InvalidVersion:
        raise ArgumentError(f"{text!r} is not a version: write it as 1.2.3") from None
