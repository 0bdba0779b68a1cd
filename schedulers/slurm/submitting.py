"""`schedulers.slurm.submit` by its earlier name: login nodes with another version call its `main`."""

from schedulers.slurm.submit import main as main
