"""The process that a job belongs to on one of its hosts: stdlib only, Python 3.8 or newer, sent as one zip file."""
