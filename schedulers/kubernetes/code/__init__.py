"""Delivery of a job's code to its pods."""
