"""Jobs and options that the tests of the kubernetes target share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedulers import JobSpec, Resources, Retry
from schedulers.config.schema import make_options
from schedulers.kubernetes.options import KubernetesOptions, check

JOB_ID = "2mxaaaaaaaa"
IMAGE = "example.org/team/train:2"
KINDS = ("pytorchjob", "jobset", "job", "trainjob")


def options(**given: Any) -> KubernetesOptions:
    found: KubernetesOptions = make_options(KubernetesOptions, given, {}, lambda path, of_key: "target k")[0]
    check(found, "k")
    return found


def least(**given: Any) -> KubernetesOptions:
    return options(image=IMAGE, **given)


def everything_spec(**more: Any) -> JobSpec:
    given: dict[str, Any] = {
        "argv": ("train.py", "--name", 'it\'s a "job"', "", "a\nb", "ü", "$(HOME) $$ $x"),
        "name": "Everything, at #once",
        "nodes": 4,
        "procs_per_node": 8,
        "resources": Resources(gpus=8, cpus=64, memory_gb=480, shm_gb=1.5, accelerator="h100"),
        "env": {"A": "1 2", "PRICE": "$(A)"},
        "secrets": {"HF_TOKEN": "secret:hugging-face/token"},
        "code": "/home/me/project",
        "workdir": "examples",
        "setup": (("pip", "install", "-e", "."),),
        "time_limit_s": 90 * 60,
        "grace_s": 120.5,
        "retry": Retry(max_restarts=3),
    }
    return JobSpec(**(given | more))


def everything(kind: str, **given: Any) -> KubernetesOptions:
    """Every option that this kind and the others that are given allow."""
    found: dict[str, Any] = {
        "workload": kind, "namespace": "team-a", "image": IMAGE, "image_pull_policy": "Always",
        "image_pull_secrets": ["registry"], "service_account": "trainer", "priority_class": "high",
        "python": "/opt/bin/python3", "setup": [["nvidia-smi"]],
        "accelerators": {"h100": {"gpu.example.org/model": "h100"}},
        "resources": {"rdma/hca_shared_devices_a": 1, "ephemeral-storage": "100Gi"},
        "host_network": True, "ipc_lock": True, "pod_security": "privileged", "node_selector": {"pool": "gpu"},
        "tolerations": [{"key": "dedicated", "value": "training", "effect": "NoSchedule"},
                        {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute", "seconds": 60}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"labelSelector": {"matchLabels": {"app": "noisy"}}, "topologyKey": "kubernetes.io/hostname"}]}},
        "volumes": [{"mount": "/data", "claim": "data", "read_only": True},
                    {"mount": "/etc/thing", "config_map": "thing"}, {"mount": "/run/keys", "secret": "keys"},
                    {"mount": "/scratch", "host_path": "/mnt/nvme", "sub_path": "me"},
                    {"mount": "/home", "nfs": "files.example.org:/export/home"},
                    {"mount": "/bucket", "source": {"csi": {"driver": "s3.csi.example.org"}}}],
        "queue": "gpu-queue", "queue_priority": "urgent", "ttl_s": 3600, "run_as_user": 1000, "run_as_group": 1000,
        "fs_group": 2000, "labels": {"team": "a"}, "annotations": {"example.org/cost-centre": "42"},
    }  # fmt: skip
    if kind == "trainjob":
        del found["ttl_s"]
    return options(**(found | given))


# One option each, on top of the least there may be.
CASES: Mapping[str, Mapping[str, Any]] = {
    "least": {},
    "namespace": {"namespace": "team-a"},
    "image_pull_policy": {"image_pull_policy": "IfNotPresent"},
    "image_pull_secrets": {"image_pull_secrets": ["a", "b"]},
    "service_account": {"service_account": "trainer"},
    "priority_class": {"priority_class": "high"},
    "python": {"python": "/opt/bin/python3"},
    "cpu": {"cpu": True},
    "setup": {"setup": [["pip", "install", "x y"]]},
    "code_claim": {"code": "pvc", "code_claim": "snapshots"},
    "code_store": {"code": "store", "code_store": {
        "url": "s3://bucket/code", "image": "example.org/aws:2", "secret": "s3",
        "endpoint": "https://minio.storage:9000", "region": "eu-west-1"}},
    "code_image": {"code": "image", "code_dir": "/app"},
    "code_image_workdir": {"code": "image"},
    "resources": {"resources": {"rdma/hca": 1, "ephemeral-storage": "10Gi"}},
    "host_network": {"host_network": True, "pod_security": "privileged"},
    "ipc_lock": {"ipc_lock": True, "pod_security": "privileged"},
    "node_selector": {"node_selector": {"pool": "gpu"}},
    "tolerations": {"tolerations": [{"key": "a"}, {"operator": "Exists"},
                                    {"key": "b", "value": "c", "effect": "NoSchedule"}]},
    "affinity": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}}}},
    "volumes": {"volumes": [{"mount": "/data", "claim": "data"},
                            {"mount": "/x", "source": {"emptyDir": {"sizeLimit": "1Gi"}}}]},
    "queue": {"queue": "gpu-queue", "queue_priority": "urgent"},
    "volcano_queue": {"volcano_queue": "research", "priority_class": "high"},
    "suspend": {"suspend": True},
    "ttl_s": {"ttl_s": 60},
    "baseline": {"pod_security": "baseline"},
    "privileged": {"pod_security": "privileged"},
    "users": {"run_as_user": 1000, "run_as_group": 1000, "fs_group": 2000},
    "labels": {"labels": {"team": "a"}, "annotations": {"example.org/a": "b"}},
    "pod_patch": {"pod_patch": {"spec": {"topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}]}}},
    "patch": {"patch": {"metadata": {"annotations": {"example.org/a": "b"}}}},
}  # fmt: skip


def allowed(kind: str, case: str) -> bool:
    return not (kind == "trainjob" and case == "ttl_s")
