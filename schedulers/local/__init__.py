"""This machine as a target: jobs that outlive the terminal, and queue for its GPUs and processors; not the ranks
(`accel/launch/`).
"""
