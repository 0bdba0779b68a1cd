"""Jobs on hosts that share nothing: placement, submit, status, logs and cleanup."""
