"""Programs for a machine that has Slurm's commands: standard library only, sent there or imported."""
