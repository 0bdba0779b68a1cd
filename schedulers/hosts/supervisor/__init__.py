"""The supervisor of a job on one of its hosts: standard library only, Python 3.8 or newer, sent as one zip file."""
