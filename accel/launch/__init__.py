"""`accel launch` on this node: devices, ranks, signals, exit, the report of a failure. Not what its flags mean
(`settings`).
"""
