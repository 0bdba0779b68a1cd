"""Named targets: accel.yaml, the schema of options, references to secrets; not the options of one target (its
`options.py`).
"""
