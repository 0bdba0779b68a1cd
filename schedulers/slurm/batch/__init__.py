"""The batch script's program on a job's first node: stdlib only, Python 3.8 or newer, sent as one zip file."""
