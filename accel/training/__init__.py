"""What a training step is made of: the optimizer, the scheduler, accumulation, compilation and profiling; not the
loop, which is the user's.
"""
