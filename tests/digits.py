"""The example `examples/digits/train.py` in float64: runs on one process and on several can then be compared.

Adam multiplies a difference in rounding by 10,000 within 40 steps. Processors round differently, by their vector width,
and so do batches of different sizes. From 1e-16 that growth stays far below what a wrong scale or sample would change.
"""

from __future__ import annotations

from pathlib import Path

DIGITS = Path(__file__).parents[1] / "examples/digits/train.py"
SAME = 1e-9  # losses in float64 of the same training on any number of processes differ by less


def write_in_float64(directory: Path) -> Path:
    """Write a copy of the example to this directory that trains in float64. Returns its path."""
    text = DIGITS.read_text()
    assert text.count("\nimport torch\n") == 1
    script = directory / "train.py"
    script.write_text(text.replace("\nimport torch\n", "\nimport torch\n\ntorch.set_default_dtype(torch.float64)\n"))
    return script
