"""Machines that are reached over SSH: names and keys, connections, files, checks, and the supervisor of a job; not
the target (`ssh`).
"""
