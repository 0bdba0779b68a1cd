"""The checks that `accel test` runs in a world of processes (``python -m accel.sanity``); not the tests of accel
(`tests/`).
"""
