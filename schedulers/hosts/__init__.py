"""Machines that are reached over SSH: names and keys, connections, files, checks, and the supervisor of a job. Not
the target (`ssh`).
"""
