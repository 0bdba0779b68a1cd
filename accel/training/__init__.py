"""The parts of a training step: the optimizer, the scheduler, accumulation and compilation; not the loop, which
is the user's.
"""
