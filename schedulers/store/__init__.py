"""The job store (one directory per job) and the snapshots of code."""
