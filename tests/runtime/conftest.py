"""Tests of the runtime need accel-launch[train] and pytest. One that needs more is skipped without it."""

from __future__ import annotations

import pytest

from tests.needs import package


@pytest.fixture
def accelerate() -> None:
    """For a test whose processes import Hugging Face's Accelerate."""
    package("accelerate")
