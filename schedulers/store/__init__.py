"""The job store, a directory a job, and the snapshots of code; not what is done with jobs (`jobs`)."""
