"""The Kubernetes clusters of the tests are what they promise to be: control plane, users, nodes, pods."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import urllib3
import yaml

from tests.clusters.kube.client import Client, Credentials, Object, Refused
from tests.clusters.kubernetes import Kubernetes, claim, lacks, main
from tests.clusters.netns import ClusterError, wait_until
from tests.needs import missing, package

ROOT = Path(__file__).parents[2]
_S = 90.0
Run = Callable[..., str]


def _pod(name: str, text: str, *, spec: Object | None = None, **container: Any) -> Object:
    inside: Object = {"name": "main", "image": "any", "command": ["sh", "-c", text], **container}
    more: Object = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 30, **(spec or {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {**more, "containers": [inside]}}


def _status(cluster: Kubernetes, place: str, name: str) -> Object:
    found: Object = cluster.client.call("GET", f"/api/v1/namespaces/{place}/pods/{name}")["status"]
    return found


def _until(cluster: Kubernetes, place: str, name: str, *phases: str) -> Object:
    wait_until(f"{name} is {phases}", lambda: _status(cluster, place, name)["phase"] in phases, _S)
    return _status(cluster, place, name)


def _until_printed(cluster: Kubernetes, place: str, name: str, text: str) -> None:
    _until(cluster, place, name, "Running", "Succeeded", "Failed")
    wait_until(f"{name} prints {text!r}", lambda: text in cluster.logs(place, name), _S)


def _waiting(cluster: Kubernetes, place: str, name: str) -> str:
    containers = _status(cluster, place, name).get("containerStatuses") or [{}]
    return str((containers[0].get("state") or {}).get("waiting", {}).get("reason"))


def _events(cluster: Kubernetes, place: str, reason: str) -> list[str]:
    items = cluster.client.call("GET", f"/api/v1/namespaces/{place}/events")["items"]
    return [each["message"] for each in items if each["reason"] == reason]


def _delete(cluster: Kubernetes, place: str, name: str) -> None:
    cluster.client.call("DELETE", f"/api/v1/namespaces/{place}/pods/{name}")
    wait_until(f"{name} is gone", lambda: name not in {pod["metadata"]["name"] for pod in cluster.pods(place)}, _S)


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


def test_a_pod_has_files_a_network_and_processes_of_its_own(cluster: Kubernetes, place: str, run: Run) -> None:
    marker = f"/tmp/.accel-{place}"
    text = (
        f"echo a >{marker}; mkdir /accel-{place}; hostname; ls /dev/shm | wc -l; ps ax | grep -c kube-api[s]erver; pwd"
    )
    assert run(text, workingDir="/tmp").split() == ["once", "0", "0", "/tmp"]
    assert not os.path.exists(marker)
    assert not os.path.exists(f"/accel-{place}")


def test_the_environment_is_expanded_and_looked_up_as_a_kubelet_does(cluster: Kubernetes, place: str, run: Run) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "hush"}}
    cluster.apply(secret, place)
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A) $$(A) $(NO) $x"},
        {"name": "C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
        {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
    ]
    printed = run('printf "%s\n" "$B" "$C" "$D" "$1"', env=env, args=["sh", "$(A)$$(A)"])
    assert printed.splitlines() == ["1 $(A) $(NO) $x", "hush", place, "1$(A)"]


def test_volumes_are_mounted_in_the_pod_alone(cluster: Kubernetes, place: str, run: Run, tmp_path: Path) -> None:
    given = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"key": "told"}}
    claimed = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "p"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }  # fmt: skip
    cluster.apply(given, place)
    cluster.apply(claimed, place)
    volumes = [
        {"name": "empty", "emptyDir": {}},
        {"name": "told", "projected": {"sources": [{"configMap": {"name": "c"}}]}},
        {"name": "kept", "persistentVolumeClaim": {"claimName": "p"}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
    ]
    mounts: list[Object] = [{"name": each["name"], "mountPath": f"/accel/{each['name']}"} for each in volumes]
    mounts[1]["readOnly"] = True
    init = {
        "name": "first",
        "image": "any",
        "command": ["sh", "-c", "echo from init >/accel/empty/f"],
        "volumeMounts": mounts,
    }
    text = "cd /accel; cat empty/f told/key; echo; echo x >told/key || echo refused; touch host/a kept/a"
    printed = run(text, spec={"volumes": volumes, "initContainers": [init]}, volumeMounts=mounts)
    assert printed.splitlines()[:2] == ["from init", "told"]
    assert "refused" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not os.path.exists("/accel/empty")
    cluster.apply(
        _pod("again", "ls /kept", spec={"volumes": volumes}, volumeMounts=[{"name": "kept", "mountPath": "/kept"}]),
        place,
    )
    _until(cluster, place, "again", "Succeeded")
    assert cluster.logs(place, "again") == "a\n"


def test_a_restricted_pod_is_nobody_and_can_become_nobody_else(run: Run) -> None:
    security = {"runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    printed = run(
        "id -u; grep -E 'NoNewPrivs|CapBnd' /proc/self/status; touch /root/x || echo refused", securityContext=security
    )
    assert printed.split()[:5] == ["1000", "CapBnd:", "0000000000000000", "NoNewPrivs:", "1"]
    assert "refused" in printed


def test_a_pod_that_is_deleted_hears_of_it_and_is_killed_after_its_grace(cluster: Kubernetes, place: str) -> None:
    trap = "trap 'echo heard' TERM; echo ready; while :; do sleep 0.1; done"
    for name, grace in (("soon", 4), ("late", 600)):
        text = trap if name == "soon" else trap.replace("echo heard", "exit 0")
        cluster.apply(_pod(name, text, spec={"terminationGracePeriodSeconds": grace}), place)
    for name in ("soon", "late"):
        _until_printed(cluster, place, name, "ready")
    following = cluster.client.open(f"/api/v1/namespaces/{place}/pods/soon/log", query={"follow": "true"})
    _delete(cluster, place, "soon")
    assert following.data == b"ready\nheard\n"
    following.release_conn()
    _delete(cluster, place, "late")


def test_logs_are_read_in_every_way_that_the_api_has(cluster: Kubernetes, place: str) -> None:
    text = 'for i in 1 2 3; do echo "line $i"; done; until [ -e /tmp/go ]; do sleep 0.1; done; printf "no newline"'
    cluster.apply(_pod("p", text), place)
    _until_printed(cluster, place, "p", "line 3")
    assert cluster.logs(place, "p", tailLines="2") == "line 2\nline 3\n"
    assert cluster.logs(place, "p", limitBytes="9") == "line 1\nli"
    assert cluster.logs(place, "p", sinceTime="2099-01-01T00:00:00Z") == ""
    assert cluster.logs(place, "p", sinceSeconds="3600") == "line 1\nline 2\nline 3\n"
    stamped = cluster.logs(place, "p", timestamps="true").splitlines()
    assert stamped == sorted(stamped)
    assert [line.partition(" ")[2] for line in stamped] == ["line 1", "line 2", "line 3"]
    assert len({line.partition("Z ")[0] for line in stamped}) == 3
    _execute(cluster, place, "p", "touch", "/tmp/go")
    _until(cluster, place, "p", "Succeeded")
    assert cluster.logs(place, "p").endswith("line 3\nno newline")


def _execute(cluster: Kubernetes, place: str, name: str, *argv: str, text: bytes | None = None) -> tuple[str, int]:
    """What the command printed on both streams, and its code."""
    websocket = package("websocket")
    asked = [("command", word) for word in argv] + [("stdout", "1"), ("stderr", "1"), ("stdin", "1" if text else "0")]
    url = f"{cluster.server}/api/v1/namespaces/{place}/pods/{name}/exec?{urlencode(asked)}"
    mine = cluster.control.admin
    files = {"ca_certs": str(cluster.control.authority.certificate), "certfile": str(mine.certificate)}
    channel = websocket.create_connection(
        url.replace("https", "wss"), sslopt={**files, "keyfile": str(mine.key)}, timeout=_S,
        subprotocols=["v4.channel.k8s.io"],
    )  # fmt: skip
    if text:
        channel.send_binary(b"\0" + text)
    printed, verdict = b"", b""
    while data := channel.recv():
        printed, verdict = (printed + data[1:], verdict) if data[0] in (1, 2) else (printed, verdict + data[1:])
    channel.shutdown()  # `close` leaves the socket open when the server was first
    told = json.loads(verdict)
    return printed.decode(), 0 if told["status"] == "Success" else int(told["details"]["causes"][0]["message"])


def test_a_command_is_executed_in_a_pod_and_its_code_comes_back(cluster: Kubernetes, place: str) -> None:
    cluster.apply(_pod("p", "echo secret >/tmp/f; sleep 1000", env=[{"name": "A", "value": "b"}]), place)
    _until(cluster, place, "p", "Running")
    wait_until("it has begun", lambda: _execute(cluster, place, "p", "cat", "/tmp/f") == ("secret\n", 0), _S)
    printed, code = _execute(cluster, place, "p", "sh", "-c", "echo $A $(hostname); echo no >&2; exit 7")
    assert (sorted(printed.splitlines()), code) == (["b p", "no"], 7)
    data = bytes(range(256))
    expected = f"{hashlib.sha256(data).hexdigest()}  -\n"
    assert _execute(cluster, place, "p", "sh", "-c", "head -c 256 | sha256sum", text=data) == (expected, 0)
    with pytest.raises(Refused, match=r"does not exist|not found"):
        cluster.client.call("GET", f"/api/v1/namespaces/{place}/pods/none/exec", query={"command": "true"})


def test_a_container_that_fails_is_started_again_and_tells_why(cluster: Kubernetes, place: str) -> None:
    text = "[ -e /kept/f ] && { echo second; exit 0; }; touch /kept/f; echo first; echo last words; exit 3"
    spec = {"restartPolicy": "OnFailure", "volumes": [{"name": "kept", "emptyDir": {}}]}
    told = {
        "volumeMounts": [{"name": "kept", "mountPath": "/kept"}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    cluster.apply(_pod("p", text, spec=spec, **told), place)
    (container,) = _until(cluster, place, "p", "Succeeded")["containerStatuses"]
    assert container["restartCount"] == 1
    ended = container["lastState"]["terminated"]
    assert (ended["exitCode"], ended["reason"], ended["message"]) == (3, "Error", "first\nlast words\n")
    assert cluster.logs(place, "p") == "second\n"
    assert cluster.logs(place, "p", previous="true") == "first\nlast words\n"


def test_what_keeps_a_pod_from_starting_is_said_as_kubernetes_does(cluster: Kubernetes, place: str) -> None:
    absent = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "none", "key": "k"}}}]
    cluster.apply(_pod("image", "true", image="example.org/no-such:1"), place)
    cluster.apply(_pod("secret", "true", env=absent), place)
    cluster.apply(_pod("large", "true", resources={"limits": {"nvidia.com/gpu": "9"}}), place)
    cluster.apply(_pod("program", "true", command=["no-such-program"]), place)
    volume = {"volumes": [{"name": "c", "configMap": {"name": "none"}}]}
    cluster.apply(_pod("volume", "true", spec=volume), place)
    wait_until("no image", lambda: _waiting(cluster, place, "image") == "ImagePullBackOff", _S)
    with pytest.raises(Refused, match="trying and failing to pull image"):
        cluster.logs(place, "image")
    wait_until("no secret", lambda: _waiting(cluster, place, "secret") == "CreateContainerConfigError", _S)
    wait_until("no room", lambda: _events(cluster, place, "FailedScheduling") != [], _S)
    assert _events(cluster, place, "FailedScheduling") == ["0/2 nodes are available: 2 Insufficient nvidia.com/gpu."]
    wait_until("no volume", lambda: _events(cluster, place, "FailedMount") != [], _S)
    (ended,) = _until(cluster, place, "program", "Failed")["containerStatuses"]
    assert (ended["state"]["terminated"]["reason"], ended["state"]["terminated"]["exitCode"]) == ("StartError", 128)


def test_pods_are_evicted_and_killed_for_want_of_memory(cluster: Kubernetes, place: str) -> None:
    for name in ("evicted", "killed"):
        cluster.apply(_pod(name, "sleep 1000"), place)
        _until(cluster, place, name, "Running")
    cluster.evict(place, "evicted")
    cluster.oom_kill(place, "killed")
    status = _until(cluster, place, "evicted", "Failed")
    assert (status["reason"], status["message"]) == ("Evicted", "The node was low on resource: memory. ")
    (ended,) = _until(cluster, place, "killed", "Failed")["containerStatuses"]
    assert (ended["state"]["terminated"]["reason"], ended["state"]["terminated"]["exitCode"]) == ("OOMKilled", 137)
    with pytest.raises(ClusterError, match="no pod"):
        cluster.evict(place, "killed")


def test_the_pods_of_a_lost_node_are_told_to_go_and_go_when_it_is_back(cluster: Kubernetes, place: str) -> None:
    chosen = {"nodeSelector": {"kubernetes.io/hostname": "n2"}}
    cluster.apply(_pod("p", "sleep 1000", spec=chosen), place)
    _until(cluster, place, "p", "Running")
    cluster.lose_node("n2")
    try:
        wait_until("told to go", lambda: "deletionTimestamp" in cluster.pods(place)[0]["metadata"], _S)
        cluster.apply(_pod("q", "true", spec=chosen), place)
        wait_until("no node", lambda: _events(cluster, place, "FailedScheduling") != [], _S)
    finally:
        cluster.find_node("n2")
    _until(cluster, place, "q", "Succeeded")
    wait_until("p is gone", lambda: [pod["metadata"]["name"] for pod in cluster.pods(place)] == ["q"], _S)


def test_pods_go_on_while_the_server_is_away_and_old_watches_expire(cluster: Kubernetes, place: str) -> None:
    path = f"/api/v1/namespaces/{place}/pods"
    version = cluster.client.call("GET", path)["metadata"]["resourceVersion"]
    cluster.apply(_pod("p", "sleep 3"), place)
    _until(cluster, place, "p", "Running", "Succeeded")
    cluster.stop_api()
    with pytest.raises(urllib3.exceptions.HTTPError):
        cluster.client.call("GET", path)
    cluster.start_api()
    _until(cluster, place, "p", "Succeeded")
    cluster.compact()
    query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": "5"}
    event = cluster.client.call("GET", path, query=query)
    assert (event["type"], event["object"]["code"], event["object"]["reason"]) == ("ERROR", 410, "Expired")


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
        'q = r.Request(f"https://{h}:6443/version", headers={"Authorization": "Bearer " + t}); '
        "print(r.urlopen(q, context=c).status)'"
    )
    assert run(text) == "200\n"


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
        made.start(1, gpus=0, kinds=("pytorchjob",))
        groups = {group["name"] for group in made.client.call("GET", "/apis")["groups"]}
        assert "kubeflow.org" in groups
        assert not groups & {"jobset.x-k8s.io", "trainer.kubeflow.org"}
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


def test_the_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    absent = lacks()
    if absent:
        missing(*absent)
    assert main(["sideways"]) == 2
    assert "kubernetes up [NODES]" in capsys.readouterr().err
    assert main(["build"]) == 0
    done = subprocess.run(
        [sys.executable, "-m", "tests.clusters.kubernetes", "status"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "etcd", "kube-apiserver", "kube-controller-manager", "node", "operators",
    ]  # fmt: skip
    assert json.dumps(done.stderr) == '""'
