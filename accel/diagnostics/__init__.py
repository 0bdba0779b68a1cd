"""The report of `accel env`: machine, packages and devices; a broken driver or package cannot hang or crash it."""
