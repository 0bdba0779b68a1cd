"""A client of the Kubernetes API: kubeconfig, credentials, TLS, requests, watches and exec."""
