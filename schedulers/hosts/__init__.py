"""Machines reached over SSH: names and keys, connections, files, checks, supervisors, and jobs (`hosts/jobs/`:
placing, sending, following, clearing); not the choice of machines (`ssh`).
"""
