"""The parts of a training step: optimizer, scheduler, accumulation and compilation."""
