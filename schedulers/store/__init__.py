"""The job store, a directory a job, and the snapshots of code. Not what is done with jobs (`jobs`)."""
