"""A Kubernetes cluster for the tests that need one: a namespace of its own a test."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import schedulers
from schedulers import Job
from schedulers.kubernetes.client.api import Api
from schedulers.kubernetes.options import KubernetesOptions
from tests.clusters.fixtures import using
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.waiting import until as until

from .servers import authority, reply, serving

CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "snapshots"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}
Submit = Callable[..., Job]
MakeApi = Callable[..., Api]


@pytest.fixture
def kubernetes(
    _cluster: Kubernetes, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kubernetes]:
    """n1 and n2, 8 seeming GPUs each, and an API server that is up; this process is its administrator."""
    with using(_cluster, request) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig()))
        yield cluster


@pytest.fixture
def namespace(kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A new one, that of this process' context."""
    made = kubernetes.namespace()
    monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig(namespace=made)))
    try:
        yield made
    finally:
        kubernetes.start_api()
        kubernetes.remove_namespace(made, wait=False)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeApi]:
    """An Api of a kubeconfig that has this server, cluster and user."""
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    made: list[Api] = []

    def make(server: str, cluster: Mapping[str, Any] | None = None, user: Mapping[str, Any] | None = None) -> Api:
        path = tmp_path / f"kubeconfig-{len(made)}"
        content = {
            "clusters": [{"name": "c", "cluster": {"server": server, **(cluster or {})}}],
            "users": [{"name": "u", "user": dict(user or {"token": "t"})}],
            "contexts": [{"name": "lab", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "lab",
        }
        path.write_text(yaml.safe_dump(content))
        made.append(Api(KubernetesOptions(kubeconfig=str(path)), "k"))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def project(project: Path) -> Path:
    (project / "note.txt").write_text("code\n")
    return project


@pytest.fixture
def submit(namespace: str, home: Path, project: Path) -> Submit:
    """Submits the text of a shell script, which needs no code, to the namespace of the test."""

    def submit(text: str, args: tuple[str, ...] = (), **given: Any) -> Job:
        options = {"cpu": True, "image": IMAGE, "code": "image", **given.pop("options", {})}
        words = ["-c", text, "sh", *args]
        settings = {"procs_per_node": 1, "grace_s": 2.0, "target": "kubernetes", **given}
        return schedulers.submit("sh", words, entry="command", cwd=project, options=options, **settings)

    return submit


def printed(job: Job) -> str:
    """By the program; a pod of one rank has its launcher's lines among them."""
    lines = [line.text for line in job.logs() if line.rank is not None]
    return "".join(line for line in lines if not line.startswith("accel launch: "))


def made_by(job: Job, cluster: Kubernetes, namespace: str) -> list[str]:
    """What there is of the job in the cluster, but for its events."""
    return [each for each in cluster.objects(namespace) if job.id in each]


def with_quota(cluster: Kubernetes, namespace: str, hard: Mapping[str, str], name: str = "small") -> None:
    """A ResourceQuota that counts when this returns."""
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": dict(hard)}}
    cluster.apply(quota, namespace)
    path = f"/api/v1/namespaces/{namespace}/resourcequotas/{name}"
    until(lambda: "used" in cluster.client.call("GET", path).get("status", {}), "the quota counts")


_WEBHOOK = """\
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {{name: accel-test-{namespace}}}
webhooks:
- name: gate.accel.test
  admissionReviewVersions: [v1]
  sideEffects: None
  namespaceSelector: {{matchLabels: {{accel-test: {namespace}}}}}
  rules: [{{apiGroups: ["*"], apiVersions: ["*"], operations: [CREATE], resources: [{plural}]}}]
  clientConfig: {{url: "{url}", caBundle: {bundle}}}
"""


@contextlib.contextmanager
def judging(
    cluster: Kubernetes, namespace: str, plural: str, pki: Path, verdict: Callable[[dict[str, Any]], str | None]
) -> Iterator[None]:
    """A webhook that is asked before one of these objects is made in the namespace: `verdict` says why it may not be.
    The API server hears of it a moment later."""

    def judge(handler: Any) -> None:
        asked = json.loads(handler.asked)["request"]
        why = verdict(asked["object"])
        told: dict[str, Any] = {"uid": asked["uid"], "allowed": why is None}
        if why is not None:
            told["status"] = {"message": why, "code": 403, "reason": "Forbidden"}
        reply(handler, {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "response": told})

    cluster.calls_back()
    ours = authority(pki)
    body = {"metadata": {"labels": {"accel-test": namespace}}}
    merge = "application/merge-patch+json"
    cluster.client.call("PATCH", f"/api/v1/namespaces/{namespace}", body, content_type=merge)
    with serving(judge, tls=ours.issue("hook", (), ["127.0.0.1"])) as server:
        bundle = base64.b64encode(ours.certificate.read_bytes()).decode()
        cluster.apply(_WEBHOOK.format(namespace=namespace, plural=plural, url=server.url, bundle=bundle))
        try:
            yield
        finally:
            path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
            cluster.client.call("DELETE", f"{path}/accel-test-{namespace}")
