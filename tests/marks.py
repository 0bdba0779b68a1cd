"""Marks for parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest


def long(*cases: Any) -> list[Any]:
    """Cases that `make test` leaves to `make test-all`: they repeat a scenario that it runs for another case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
