"""Named targets: accel.yaml, the options of each target, references to secrets."""
