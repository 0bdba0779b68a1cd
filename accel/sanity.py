"""The earlier name of `accel.selftest`, which stored jobs still run."""

import sys

from accel.selftest.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
