"""What a test may need that a machine may lack."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str, remedy: str) -> NoReturn:
    """Skips the test for want of something, and says how to get it; fails it in CI, where nothing may be missing."""
    text = f"{what} is missing: {remedy}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)
