"""Skips of tests whose programs or packages this machine lacks."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest

# Not installed by `make test`, so that a fork's CI may lack them.
_OPTIONAL = frozenset({"kubernetes", "gcloud"})


def missing(what: str, remedy: str) -> NoReturn:
    """Skip the test because `what` is missing; `remedy` says how to install it.

    Fail it instead in CI, unless the first word of `what` is optional, and if ACCEL_TEST_REQUIRE (a,b,…) has that word.
    """
    text = f"{what} is missing: {remedy}"
    name = what.partition(" ")[0].lower()
    required = os.environ.get("ACCEL_TEST_REQUIRE", "").lower().split(",")
    if name in required or (os.environ.get("CI") and name not in _OPTIONAL):
        pytest.fail(text)
    pytest.skip(text, allow_module_level=True)


def package(name: str) -> Any:
    """A module of a package that the tests use, which `make test` installs. Skips, or fails, for want of it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing(f"{error.name or name}", "pip install -c constraints.txt -e '.[dev]'")


def gcloud() -> None:
    """Skip the test if Google's gcloud is not installed."""
    if shutil.which("gcloud") is None:
        missing("gcloud", "install the Google Cloud CLI (https://cloud.google.com/sdk)")
