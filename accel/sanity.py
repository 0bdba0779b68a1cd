"""`accel.selftest` by its earlier name: argvs of stored jobs run it."""

import sys

from accel.selftest.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
