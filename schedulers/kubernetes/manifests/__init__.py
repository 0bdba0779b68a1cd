"""The objects of a job as plain dictionaries, built by pure functions."""
