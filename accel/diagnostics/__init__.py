"""What this machine and this installation are, asked so that nothing that is broken or hangs gets in the way."""
