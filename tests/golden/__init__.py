"""Texts that programs write, kept as they should be. `make golden` renews them; read the difference."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(name: str, text: str) -> None:
    """The text is what `tests/golden/<name>` holds, or becomes it when asked to be renewed."""
    path = Path(__file__).parent / name
    if os.environ.get("ACCEL_RENEW_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text
