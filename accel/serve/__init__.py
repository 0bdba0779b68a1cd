"""`accel serve`: a REST API with users and tokens, over a job store of its own."""
