"""The SSH target: machines that share nothing; a supervisor on each runs the job and needs no client."""
