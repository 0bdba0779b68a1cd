"""The parts of a Kubernetes cluster that runs on this computer: `tests/clusters/kubernetes.py` puts them together."""
