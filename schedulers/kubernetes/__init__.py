"""The Kubernetes target: one object a job, whose pods run `accel launch`; the charts in `helm/` create the same."""
