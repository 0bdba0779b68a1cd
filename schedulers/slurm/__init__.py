"""Slurm, on its login node or from a laptop over SSH: one batch job a job, `accel launch` on each of its nodes. Not
SSH itself (`hosts`).
"""
