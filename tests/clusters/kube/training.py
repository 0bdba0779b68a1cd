"""The real training operator 1.8 (PyTorchJob) on a machine of its own, and what its deployment has in a cluster.

Its webhook is called through a Service, as in a deployment; who answers for that Service is written here, since the
operator is no pod. https://github.com/kubeflow/trainer/tree/release-1.8/manifests
"""

from __future__ import annotations

import base64
import shutil
from functools import partial

import yaml

from ..netns import ClusterError, Machine, Network, answers, spawn, wait_until
from . import images, objects, programs
from .client import Client, Object, Refused
from .pki import Authority

_INDEX = 9  # of its machine, behind those of the nodes
_SPACE, _NAME, _PORT, _SECRET = "kubeflow", "training-operator", 9443, "training-operator-webhook-cert"
_CERTIFICATES = "k8s-webhook-server/serving-certs"
_START_S = 120.0
# Of a worker that has a master, as the operator's own but for `nslookup`, which the image has not.
_INIT = """\
- name: init-pytorch
  image: {{.InitContainerImage}}
  imagePullPolicy: IfNotPresent
  command: [sh, -c, "for i in $(seq {{.MaxTries}}); do getent hosts {{.MasterAddr}} && exit; sleep 2; done; exit 1"]
"""
_PYTORCHJOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"


class TrainingOperator:
    """To be started once its kind is there."""

    def __init__(self, network: Network, authority: Authority) -> None:
        # What it calls /tmp is its own: it reads its certificates there.
        self.machine = Machine(
            network, _INDEX, "operator", lambda machine: f"mount --bind {machine.own}/tmp /tmp\nexec sleep infinity\n"
        )
        self._authority = authority
        self.log = network.slot.box / "log/training-operator.txt"

    def start(self, client: Client) -> None:
        """It is ready, and the API server asks it, when this returns."""
        for path, body in self._objects():
            objects.create(client, path, body)
        own = self.machine.own / "tmp"
        (own / _CERTIFICATES).mkdir(parents=True)
        shutil.copy2(programs.directory() / "training-operator", own / "manager")
        (own / "kubeconfig.yaml").write_text(yaml.safe_dump(self._kubeconfig(client.server)))
        (own / "init.yaml").write_text(_INIT)
        self.machine.start()
        wait_until("the operator's machine is up", self._booted, _START_S)
        argv = [
            "/tmp/manager", "--kubeconfig=/tmp/kubeconfig.yaml", "--enable-scheme=PyTorchJob", "--zap-log-level=error",
            "--pytorch-init-container-template-file=/tmp/init.yaml", f"--pytorch-init-container-image={images.TRAIN}",
        ]  # fmt: skip
        spawn(self.machine.argv(*argv), self.log)
        # As a kubelet would, from the Secret that the operator fills.
        wait_until(f"the operator has made its certificates ({self.log})", lambda: bool(_held(client)), _START_S)
        for name, text in _held(client).items():
            (own / _CERTIFICATES / name).write_bytes(base64.b64decode(text))
        wait_until(
            f"the training operator answers ({self.log})", lambda: answers(self.machine.address, _PORT), _START_S
        )
        wait_until(f"the API server asks the training operator ({self.log})", partial(_judged, client), _START_S)

    def end(self) -> None:
        self.machine.end()

    def _booted(self) -> bool:
        try:
            self.machine.run("test", "-e", "/tmp/manager")
        except ClusterError:
            return False
        return True

    def _kubeconfig(self, server: str) -> Object:
        mine, key = self._authority.issue("training-operator", ("system:masters",))
        files = {"client-certificate-data": mine, "client-key-data": key}
        user = {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items()}
        authority = base64.b64encode(self._authority.certificate.read_bytes()).decode()
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority-data": authority}}],
            "users": [{"name": "u", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip

    def _objects(self) -> list[tuple[str, Object]]:
        inside = {"namespace": _SPACE}
        port = {"name": "webhook-server", "port": 443, "targetPort": _PORT}
        where = {"service": {"name": _NAME, "namespace": _SPACE, "path": "/validate-kubeflow-org-v1-pytorchjob"}}
        rule = {
            "apiGroups": ["kubeflow.org"], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
            "resources": ["pytorchjobs"],
        }  # fmt: skip
        webhook = {
            "name": "validator.pytorchjob.training-operator.kubeflow.org", "failurePolicy": "Fail", "rules": [rule],
            "clientConfig": where, "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }  # fmt: skip
        slice_ = {
            "metadata": {"name": _NAME, **inside, "labels": {"kubernetes.io/service-name": _NAME}},
            "addressType": "IPv4", "endpoints": [{"addresses": [self.machine.address]}],
            "ports": [{"name": "webhook-server", "port": _PORT}],
        }  # fmt: skip
        space = f"/api/v1/namespaces/{_SPACE}"
        return [
            ("/api/v1/namespaces", {"metadata": {"name": _SPACE}}),
            (f"{space}/secrets", {"metadata": {"name": _SECRET, **inside}}),
            (f"{space}/services", {"metadata": {"name": _NAME, **inside}, "spec": {"ports": [port]}}),
            (f"/apis/discovery.k8s.io/v1/namespaces/{_SPACE}/endpointslices", slice_),
            ("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
             {"metadata": {"name": "validator.training-operator.kubeflow.org"}, "webhooks": [webhook]}),
        ]  # fmt: skip


def _held(client: Client) -> dict[str, str]:
    """The operator's certificates, once there are any."""
    return client.call("GET", f"/api/v1/namespaces/{_SPACE}/secrets/{_SECRET}").get("data") or {}


def _judged(client: Client) -> bool:
    """Whether the operator, and not the server alone, refuses a job whose container has a wrong name."""
    inside = {"containers": [{"name": "wrong", "image": "none"}]}
    spec = {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": {"spec": inside}}}}
    body = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "asked"}, "spec": spec}
    try:
        client.call("POST", _PYTORCHJOBS, body, query={"dryRun": "All"})
    except Refused as error:
        return "is not defined" in str(error) or "pytorchReplicaSpecs" in str(error)
    return False
