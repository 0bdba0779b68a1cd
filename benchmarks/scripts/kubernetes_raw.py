"""kubernetes_raw.py MANIFEST: makes one PyTorchJob with the official client, and nothing else."""

import json
import sys
from pathlib import Path

from kubernetes import client, config

body = json.loads(Path(sys.argv[1]).read_text())
body["metadata"].pop("name", None)
body["metadata"]["generateName"] = "raw-"
config.load_kube_config()
_, active = config.list_kube_config_contexts()
namespace = active["context"].get("namespace", "default")
client.CustomObjectsApi().create_namespaced_custom_object("kubeflow.org", "v1", namespace, "pytorchjobs", body)
