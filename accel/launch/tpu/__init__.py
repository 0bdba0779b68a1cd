"""TPU VMs, reached by Google's own command line."""
