"""What may be said of a kubernetes target, and one clear line for what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers import ConfigError, SpecError
from tests.schedulers.kubernetes.support import KINDS, everything, options

_STORE = {"url": "s3://bucket/code", "image": "aws"}


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_them_can_be_said(kind: str) -> None:
    assert everything(kind).workload == kind


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workload": "pytorch"}, "workload: expects one of 'pytorchjob', 'jobset', 'job', 'trainjob', got 'pytorch'"),
        ({"gpus": 1}, "unknown key 'gpus'; use accel submit --gpus"),
        ({"volumes": [{"mount": "/a", "clam": "b"}]}, "volumes[0]: unknown key 'clam'; did you mean 'claim'?"),
        ({"namespace": "Team_A"}, "namespace must consist of lowercase letters, digits and hyphens (63 at most)"),
        ({"service_account": "a/b"}, "service_account must be an object's name"),
        ({"image_pull_secrets": ["A"]}, "image_pull_secrets: 'A' is not the name of a Secret"),
        ({"image": "a b:1"}, "image must be one word, not 'a b:1'"),
        ({"image": "a\n"}, "image must be one word"),
        ({"python": "python3 -X dev"}, "python must be one word, not 'python3 -X dev'"),
        ({"python": "~/venv/bin/python"}, "python: ~/venv/bin/python: an image has no home directory"),
        ({"start_timeout_s": 0.0}, "start_timeout_s must be more than 0, not 0"),
        ({"ttl_s": -1}, "ttl_s must be 0 or more, not -1"),
        ({"setup": [[]]}, "setup: a command has no program"),
        ({"code": "pvc"}, "code: pvc needs code_claim"),
        ({"code": "store"}, "code: store needs code_store"),
        ({"code_claim": "a", "code_store": _STORE}, "code_claim and code_store are both set: remove one"),
        ({"code_dir": "/app"}, "code_dir, the code's directory in the image, needs code: image"),
        ({"code": "image", "code_dir": "app"}, "code_dir must begin with /, not 'app'"),
        ({"code_store": _STORE | {"url": "https://x"}}, "code_store.url must be like s3://bucket/prefix, not 'https://x'"),
        ({"code_store": _STORE | {"endpoint": "minio:9000"}}, "code_store.endpoint must be like https://host:port"),
        ({"code_store": {"url": "s3://bucket"}}, "code_store: Object missing required field `image`"),
        ({"labels": {"a b": "c"}}, "labels: 'a b' is not a label's name"),
        ({"node_selector": {"a": "x y"}}, "node_selector: 'x y' of a is not a label's value"),
        ({"annotations": {"/": ""}}, "annotations: '/' is not an annotation's name"),
        ({"labels": {"accel.dev/job-id": "x"}}, "accel sets accel.dev/job-id itself: leave it out"),
        ({"labels": {"kueue.x-k8s.io/queue-name": "x"}}, "itself: leave it out (queue:)"),
        ({"accelerators": {"h100": {}}}, "accelerators: h100 has no node labels"),
        ({"resources": {"cpu": 4}}, "resources: cpu is set by --cpus: leave it out"),
        ({"resources": {"nvidia.com/gpu": 4}}, "resources: nvidia.com/gpu is set by --gpus: leave it out"),
        ({"resources": {"rdma/hca": "many"}}, "resources: rdma/hca must be a quantity such as 1 or 100Gi, not 'many'"),
        ({"gpu_resource": "gpu"}, "gpu_resource must be like nvidia.com/gpu, not 'gpu'"),
        ({"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "operator Exists takes no value"),
        ({"tolerations": [{"value": "b"}]}, "tolerations: a value needs a key"),
        ({"tolerations": [{"key": "a", "seconds": 3}]}, "tolerations: a: seconds needs effect: NoExecute"),
        ({"volumes": [{"mount": "data", "claim": "a"}]}, "volumes: mount must be a directory such as /data"),
        ({"volumes": [{"mount": "/dev/shm", "claim": "a"}]}, "accel mounts something there itself (shm_gb in"),
        ({"volumes": [{"mount": "/accel/code", "claim": "a"}]}, "volumes: /accel/code: accel mounts something there"),
        ({"volumes": [{"mount": "//x/../accel/./code/", "claim": "a"}]}, "accel mounts something there itself"),
        ({"volumes": [{"mount": "/a/..", "claim": "a"}]}, "volumes: mount must be a directory such as /data"),
        ({"volumes": [{"mount": "/a", "source": {"name": "x"}}]}, "/a: source must be one volume source such as"),
        ({"volumes": [{"mount": "/a", "claim": "a"}, {"mount": "/a/", "claim": "b"}]}, "volumes: /a/ is given twice"),
        ({"volumes": [{"mount": "/a"}]}, "volumes: /a needs one of claim, config_map, secret,"),
        ({"volumes": [{"mount": "/a", "claim": "a", "secret": "b"}]}, "and has claim and secret"),
        ({"volumes": [{"mount": "/a", "nfs": "host"}]}, "volumes: /a: nfs must be like server:/path, not 'host'"),
        ({"volumes": [{"mount": "/a", "host_path": "/b"}]}, "volumes: /a: a directory of the node needs pod_sec"),
        ({"volumes": [{"mount": "/a", "source": {"hostPath": {"path": "/b"}}}]}, "a directory of the node"),
        ({"host_network": True}, "host_network needs pod_security: privileged, not restricted"),
        ({"ipc_lock": True, "pod_security": "baseline"}, "ipc_lock needs pod_security: privileged, not baseline"),
        ({"run_as_user": 0}, "run_as_user: 0 is root, which pod_security: restricted forbids"),
        ({"run_as_user": -1}, "run_as_user must be 0 to 2147483647, not -1"),
        ({"queue_priority": "a"}, "queue_priority needs queue"),
        ({"queue": "a", "volcano_queue": "b"}, "queue (Kueue) and volcano_queue are both set: remove one"),
        ({"runtime": "torch"}, "runtime: torch needs workload: trainjob, not pytorchjob"),
        ({"runtime": "a/b", "workload": "trainjob"}, "runtime must be an object's name"),
        ({"runtime": "torch", "workload": "trainjob"}, "runtime needs code: image, since a TrainJob cannot"),
        ({"runtime": "torch", "workload": "trainjob", "code": "image", "priority_class": "high"},
         "priority_class: a TrainJob cannot set it: leave it out, since the runtime torch decides"),
        ({"workload": "trainjob", "ttl_s": 1}, "ttl_s is not supported by TrainJobs"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant(given: dict[str, Any], message: str) -> None:
    with pytest.raises((SpecError, ConfigError)) as caught:
        options(**given)
    assert str(caught.value).startswith("target k")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
