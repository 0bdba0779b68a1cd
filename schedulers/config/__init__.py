"""Named targets: accel.yaml, the schema of options, references to secrets. Not the options of one target (its
`options.py`).
"""
