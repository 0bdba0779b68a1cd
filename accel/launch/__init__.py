"""`accel launch` on this node: devices, ranks, signals, exit codes and failure reports."""
