"""Programs for a machine with Slurm's commands: standard library only, sent there or imported."""
