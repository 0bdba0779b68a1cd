"""Machines that share nothing, over SSH: a supervisor on each runs the job and needs no client; not SSH itself
(`hosts`).
"""
