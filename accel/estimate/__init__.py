"""Memory estimates of `accel estimate-memory`, from a model's description: nothing is loaded or allocated."""
