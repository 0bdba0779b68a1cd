"""`accel launch` on this node: devices, ranks, signals, exit, the report of a failure; not what its flags mean
(`settings`).
"""
