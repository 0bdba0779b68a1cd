"""The Slurm target: a batch job per job, with `accel launch` on each node; on a login node or over SSH."""
