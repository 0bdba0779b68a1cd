"""Job statuses, derived from the cluster's objects, pods and events."""
