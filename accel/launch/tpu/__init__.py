"""TPU hosts, and commands on TPU VMs over gcloud."""
