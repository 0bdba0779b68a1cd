"""`python -m accel` is the command `accel`."""

from __future__ import annotations

import sys

from accel.cli import main

if __name__ == "__main__":
    sys.exit(main())
