"""The checks of `accel test`, which run in a world of processes (``python -m accel.sanity``)."""
