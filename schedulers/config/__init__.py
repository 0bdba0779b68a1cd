"""Named targets: `accel.yaml`, the schema of target options, and references to secrets."""
