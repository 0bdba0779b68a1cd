"""The service target: jobs that a server of `accel serve` submits to one of its own targets."""
