"""Machines that are reached over SSH: who they are, connections to them, files on them, and what they can do."""
