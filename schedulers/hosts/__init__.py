"""Machines over SSH: connections, host keys, files, preflight, supervisors, and jobs on them (`hosts/jobs/`)."""
