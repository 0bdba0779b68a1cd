"""The local target: jobs on this machine that outlive the terminal and queue for its GPUs and processors."""
