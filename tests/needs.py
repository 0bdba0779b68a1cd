"""What a test may need that a machine may lack."""

from __future__ import annotations

import importlib
import os
import shutil
from typing import Any, NoReturn

import pytest


def missing(what: str, remedy: str) -> NoReturn:
    """Skips the test for want of something, and says how to get it; fails it in CI, where nothing may be missing."""
    text = f"{what} is missing: {remedy}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text, allow_module_level=True)


def package(name: str) -> Any:
    """A module of a package that the tests use, which `make test` installs. Skips, or fails, for want of it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing(f"{error.name or name}", "pip install -c constraints.txt -e '.[dev]'")


def gcloud() -> None:
    """Skips the test where Google's gcloud is not installed: in CI too, where its packages are not."""
    if shutil.which("gcloud") is None:
        pytest.skip("gcloud is missing: install the Google Cloud CLI (https://cloud.google.com/sdk)")
