"""A client of the Kubernetes API: kubeconfig, credentials, requests, watches and exec."""
