"""The Kubernetes of the tests is what it promises to be: users, pods, nodes, programs; and nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clusters.kube import programs
from tests.clusters.kube.client import Client, Credentials, Object, Refused
from tests.clusters.kube.images import TRAIN
from tests.clusters.kubernetes import Kubernetes, claim, lacks, main
from tests.clusters.netns import ClusterError, call, wait_until
from tests.needs import missing

ROOT = Path(__file__).parents[2]
_S = 90.0
Run = Callable[..., str]


def _pod(name: str, text: str, *, spec: Object | None = None, **container: Any) -> Object:
    inside: Object = {"name": "main", "image": TRAIN, "command": ["sh", "-c", text], **container}
    more: Object = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 30, **(spec or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**more, "containers": [inside]}}


def _status(cluster: Kubernetes, place: str, name: str) -> Object:
    found: Object = cluster.client.call("GET", f"/api/v1/namespaces/{place}/pods/{name}")["status"]
    return found


def _until(cluster: Kubernetes, place: str, name: str, *phases: str) -> Object:
    wait_until(f"{name} is {phases}", lambda: _status(cluster, place, name)["phase"] in phases, _S)
    return _status(cluster, place, name)


@pytest.fixture
def run(cluster: Kubernetes, place: str) -> Run:
    """Runs a pod to its end, which must be a good one, and returns what it printed."""

    def run(text: str, **more: Any) -> str:
        cluster.apply(_pod("once", text, **more), place)
        status = _until(cluster, place, "once", "Succeeded", "Failed")
        printed = cluster.logs(place, "once")
        assert status["phase"] == "Succeeded", printed
        return printed

    return run


def test_a_pod_sees_the_programs_of_this_computer_and_has_files_of_its_own(run: Run, place: str) -> None:
    text = "id -u; hostname; python -c 'import accel'; touch /usr/x 2>/dev/null || echo refused; touch $HOME/x"
    assert run(text, workingDir="/tmp").split() == ["1000", "once", "refused"]
    assert not Path("/home/accel/x").exists()


@pytest.mark.long
@pytest.mark.alone
def test_a_frozen_kubelet_goes_on(cluster: Kubernetes, place: str) -> None:
    node = cluster.nodes["n1"]
    with pytest.raises(ClusterError, match="no sendmail runs on n1"):
        node.signal("sendmail", signal.SIGSTOP)
    node.signal("kubelet", signal.SIGSTOP)
    try:
        cluster.apply(_pod("p", "true", spec={"nodeSelector": {"kubernetes.io/hostname": "n1"}}), place)
        wait_until("it is bound", lambda: bool(cluster.pods(place)[0]["spec"].get("nodeName")), _S)
        assert _status(cluster, place, "p")["phase"] == "Pending"
    finally:
        node.signal("kubelet", signal.SIGCONT)
    _until(cluster, place, "p", "Succeeded")


def test_users_may_what_they_are_given_and_an_expired_token_nothing(cluster: Kubernetes, place: str) -> None:
    def pods(kubeconfig: Path) -> int:
        told = yaml.safe_load(kubeconfig.read_text())
        user, authority = told["users"][0]["user"], Path(told["clusters"][0]["cluster"]["certificate-authority"])
        with_files = "token" not in user
        mine = Credentials(Path(user["client-certificate"]), Path(user["client-key"])) if with_files else user["token"]
        client = Client(told["clusters"][0]["cluster"]["server"], authority, mine)
        try:
            client.call("GET", f"/api/v1/namespaces/{place}/pods")
        except Refused as error:
            return error.status
        finally:
            client.close()
        return 200

    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    group = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "sa", "namespace": place}
    reference = {"apiGroup": group, "kind": "Role", "name": "r"}
    cluster.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "sa"}}, place)
    account = cluster.kubeconfig(service_account="sa", namespace=place)
    assert pods(account) == 403
    cluster.apply({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "r"}, "rules": rules}, place)
    binding = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": {"name": "b"}}
    cluster.apply({**binding, "subjects": [subject], "roleRef": reference}, place)
    wait_until("the role is seen", lambda: pods(account) == 200, _S)
    assert pods(cluster.kubeconfig(namespace=place)) == 200
    assert pods(cluster.kubeconfig("alice", namespace=place)) == 403
    old = cluster.token("sa", place, expired=True)
    assert pods(cluster.kubeconfig(service_account="sa", namespace=place, token=old)) == 401


def test_a_pod_reaches_the_server_with_its_service_account(run: Run, place: str) -> None:
    top = "/var/run/secrets/kubernetes.io/serviceaccount"
    text = (
        f'python -c \'import os, ssl, urllib.request as r; t = open("{top}/token").read(); '
        f'c = ssl.create_default_context(cafile="{top}/ca.crt"); h = os.environ["KUBERNETES_SERVICE_HOST"]; '
        'q = r.Request(f"https://{h}/version", headers={"Authorization": "Bearer " + t}); '
        "print(r.urlopen(q, context=c).status)'"
    )
    assert run(text) == "200\n"


def test_programs_come_from_a_directory_or_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ACCEL_KUBERNETES_PROGRAMS", "KUBEBUILDER_ASSETS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "ACCEL_KUBERNETES_PROGRAMS names a directory" in (programs.lacking() or ("", ""))[1]
    (tmp_path / "bin").mkdir()
    for name in programs.API:
        (tmp_path / "bin" / name).touch(mode=0o755)
    archive = tmp_path / "programs.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(tmp_path / "bin", "bin")
    for given in (archive, tmp_path, tmp_path / "bin"):
        monkeypatch.setenv("ACCEL_KUBERNETES_PROGRAMS", str(given))
        assert programs.lacking(programs.API) is None
    what, remedy = programs.lacking() or ("", "")
    assert "kubelet" in what
    assert f"not in {tmp_path / 'bin'}" in remedy
    archive.write_bytes(b"no archive")
    monkeypatch.setenv("ACCEL_KUBERNETES_PROGRAMS", str(archive))
    assert str(archive) in (programs.lacking() or ("", ""))[1]
    monkeypatch.delenv("ACCEL_KUBERNETES_PROGRAMS")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path / "bin"))
    assert programs.lacking(programs.API) is None
    assert programs.lacking() is not None


def _left(cluster: Kubernetes) -> list[str]:
    """Whatever is still there: directories, mounts, interfaces, processes."""
    tag, box = cluster.slot.tag, str(cluster.box)
    found = [box] if cluster.box.exists() else []
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if f"{box}/" in line]
    found += [name for name in os.listdir("/sys/class/net") if name.startswith((f"{tag}v", f"{tag}br"))]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_text()
        except OSError:
            continue
        found += [f"{entry.name} {words}"] if f"{box}/" in words or words.endswith(f"{box}\0") else []
    return found


def test_nothing_is_left_of_a_cluster_that_was_stopped_nor_of_its_pods(tmp_path: Path) -> None:
    absent = lacks()
    if absent:
        missing(*absent)
    with claim() as made:
        made.start(1, gpus=0)
        place = made.namespace()
        volumes = [{"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}]
        mounts = [{"name": "m", "mountPath": "/m"}]
        made.apply(
            _pod("p", f"exec sleep 987654; # {made.box}/", spec={"volumes": volumes}, volumeMounts=mounts), place
        )
        _until(made, place, "p", "Running")
        running = [line for line in _left(made) if "kube-apiserver" in line]
        assert len(running) == 1
        made.stop()
        assert _left(made) == []


@pytest.mark.alone
def test_a_part_that_has_gone_is_named_and_mended(cluster: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.clusters.kubernetes._HEAL_S", 0.5)
    cluster.check()
    cluster.control.names.stop()
    call("ip", "route", "del", cluster.nodes["n1"].pods)
    with pytest.raises(
        ClusterError, match="the cluster is not well:\ncoredns has ended\nthe pods of n1 are not routed"
    ):
        cluster.check()
    monkeypatch.undo()
    cluster.check()


def test_the_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    absent = lacks()
    if absent:
        missing(*absent)
    assert main(["sideways"]) == 2
    assert "kubernetes up [NODES]" in capsys.readouterr().err
    done = subprocess.run(
        [sys.executable, "-m", "tests.clusters.kubernetes", "status"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns", "operators",
    ]  # fmt: skip
    assert json.dumps(done.stderr) == '""'
