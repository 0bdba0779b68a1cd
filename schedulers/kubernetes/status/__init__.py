"""The state of jobs, from what the cluster says of their objects, pods and events."""
