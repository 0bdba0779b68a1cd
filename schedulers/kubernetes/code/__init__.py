"""A job's code on its way into its pods."""
