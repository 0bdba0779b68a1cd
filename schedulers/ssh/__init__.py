"""Machines that share nothing, over SSH: a supervisor on each of them runs the job, and needs no client to do so;
not SSH itself (`hosts`).
"""
