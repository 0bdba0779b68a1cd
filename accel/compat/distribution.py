"""What `importlib.metadata` says of Accelerate while accel answers for it."""

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
    """A distribution of two texts and no files."""

    def read_text(self, filename: str | PathLike[str]) -> str | None:
        """The text of a metadata file, or ``None`` if there is none of that name."""
        return _FILES.get(str(filename))

    def locate_file(self, path: str | PathLike[str]) -> Path:
        """Where a file of the distribution would be."""
        return Path(__file__).parent / path
