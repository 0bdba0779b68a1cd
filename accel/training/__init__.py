"""What a training step is made of: the optimizer, the scheduler, accumulation and compilation; not the loop, which is
the user's.
"""
