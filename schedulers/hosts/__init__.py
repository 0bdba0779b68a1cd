"""Machines that are reached over SSH: names and keys, connections, files, checks, the supervisor of a job, and jobs on
them (`hosts/jobs/`: placing, sending, following, clearing); not which machines they are (`ssh`).
"""
