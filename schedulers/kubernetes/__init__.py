"""The Kubernetes target: one object per job, whose pods run `accel launch`. The charts (`helm/`) must equal it."""
