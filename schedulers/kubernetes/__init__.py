"""The Kubernetes target: one object a job, whose pods run `accel launch`. The charts (`helm/`) create the same
objects.
"""
