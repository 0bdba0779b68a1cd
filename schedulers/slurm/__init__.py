"""Slurm, on its login node or from a laptop over SSH: one batch job a job, `accel launch` on each of its nodes; not
SSH itself (`hosts`).
"""
