"""Real servers for the tests, each also a command: `python -m tests.clusters.ssh up 4`."""
