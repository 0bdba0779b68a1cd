"""The checks that `accel test` runs in a world of processes (``python -m accel.sanity``). Not the tests of accel
(`tests/`).
"""
