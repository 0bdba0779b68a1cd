"""Slurm, on its login node or over SSH (`hosts`): a batch job per job, with `accel launch` on each node."""
