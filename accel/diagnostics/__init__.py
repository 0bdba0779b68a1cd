"""What this machine and this installation are, read so that nothing broken or slow gets in the way. Not whether
training works (`selftest`).
"""
