"""What this machine and this installation are, read so that nothing broken or slow gets in the way; not whether
training works (`selftest`).
"""
