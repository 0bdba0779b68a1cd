"""Accelerate's distribution in `importlib.metadata`, as accel presents it."""

from __future__ import annotations

from importlib.metadata import Distribution
from os import PathLike
from pathlib import Path

from accel.compat.version import NAME, VERSION

_FILES = {
    "METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\nSummary: answered by accel.compat\n",
    "top_level.txt": f"{NAME}\n",
}


class Answered(Distribution):
    """A distribution with two metadata texts and no files."""

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """Return the text of a metadata file, or ``None``."""
        return _FILES.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Return the path that a file of the distribution would have."""
        return Path(__file__).parent / path
