"""The tests' Cloud TPU API is what Google documents, for its Python client and for gcloud."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clusters.netns import answers, call
from tests.clusters.tpu import LAUNCHER, PARENT, PROJECT, SERVICE_ACCOUNT, Tpu
from tests.needs import gcloud, package
from tests.waiting import until

VERSION = "tpu-ubuntu2204-base"
METADATA = "http://169.254.169.254/computeMetadata/v1/"
GET = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"Metadata-Flavor": "Google"})
with urllib.request.urlopen(request) as reply:
    sys.stdout.write(reply.headers["ETag"] + " " + reply.read().decode())
"""


@pytest.fixture
def client(tpu: Tpu) -> Iterator[Any]:
    with tpu.client() as client:
        yield client


def _node(kind: str = "v4-16", **more: Any) -> dict[str, Any]:
    return {"accelerator_type": kind, "runtime_version": VERSION, **more}


def _create(client: Any, name: str, kind: str = "v4-16", parent: str = PARENT, **more: Any) -> Any:
    return client.create_node(parent=parent, node_id=name, node=_node(kind, **more))


def _enqueue(client: Any, name: str, *, force_spot: bool = False, count: int = 0, **more: Any) -> Any:
    naming = {"multislice_params": {"node_count": count}} if count else {"node_id": f"{name}-node"}
    resource = {"tpu": {"node_spec": [{"parent": PARENT, "node": _node("v4-8"), **naming}]}, **more}
    resource |= {"spot": {}} if force_spot else {}
    return client.create_queued_resource(parent=PARENT, queued_resource_id=name, queued_resource=resource)


def _refusal(function: Any, *args: Any, **arguments: Any) -> tuple[str, str]:
    with pytest.raises(package("google.api_core.exceptions").GoogleAPICallError) as caught:
        function(*args, **arguments)
    return type(caught.value).__name__, caught.value.message


def _get(tpu: Tpu, host: str, key: str) -> str:
    return _with_etag(tpu, host, key)[1]


def _with_etag(tpu: Tpu, host: str, key: str) -> tuple[str, str]:
    etag, _, text = tpu.hosts[host].run(sys.executable, "-I", "-S", "-c", GET, METADATA + key).partition(" ")
    return etag, text


def test_a_slice_has_hosts_whose_keys_the_api_knows(tpu: Tpu, client: Any) -> None:
    node = _create(client, "pair", labels={"made-by": "test"}, network_config={"enable_external_ips": True}).result()
    assert (node.name, node.state.name, dict(node.labels)) == (f"{PARENT}/nodes/pair", "READY", {"made-by": "test"})
    addresses = [endpoint.ip_address for endpoint in node.network_endpoints]
    assert addresses == [tpu.hosts[name].address for name in tpu.workers("pair")]
    assert [endpoint.access_config.external_ip for endpoint in node.network_endpoints] == addresses
    reply = client.get_guest_attributes(request={"name": node.name, "query_path": "hostkeys/"})
    published = [(item.key, item.value) for worker in reply.guest_attributes for item in worker.query_value.items]
    scanned = [call("ssh-keyscan", "-t", "ed25519", address).split()[1:3] for address in addresses]
    assert published == [tuple(words) for words in scanned]
    one = client.get_guest_attributes(request={"name": node.name, "worker_ids": ["1"]}).guest_attributes
    assert [(item.namespace, item.value) for item in one[0].query_value.items][:1] == [("hostkeys", scanned[1][1])]
    tpu.host_keys(False)
    reply = client.get_guest_attributes(request={"name": node.name, "query_path": "hostkeys/"})
    assert [list(worker.query_value.items) for worker in reply.guest_attributes] == [[], []]
    client.delete_node(name=node.name).result()
    assert not list(client.list_nodes(parent=PARENT))
    assert tpu.history("pair") == ["CREATING", "READY", "DELETING", ""]
    assert not any(answers(address, 22) for address in addresses)
    again = _create(client, "again").result()
    assert [endpoint.ip_address for endpoint in again.network_endpoints] == addresses
    assert [call("ssh-keyscan", "-t", "ed25519", address).split()[1:3] for address in addresses] != scanned


def test_the_keys_of_the_metadata_let_their_users_in(tpu: Tpu, client: Any) -> None:
    key = tpu.hosts.box / "client/.ssh/google_compute_engine"
    node = _create(client, "keys", "v4-8").result()
    options = ["-i", str(key), "-oIdentitiesOnly=yes", "-oStrictHostKeyChecking=no", "-oUserKnownHostsFile=/dev/null"]
    argv = ["ssh", "-F", "/dev/null", *options, "-oBatchMode=yes", f"worker@{node.network_endpoints[0].ip_address}"]
    assert subprocess.run([*argv, "true"], capture_output=True).returncode == 255
    node.metadata["ssh-keys"] = f"worker:{key.with_suffix('.pub').read_text()}"
    node.labels["kept"] = "no"
    client.update_node(node=node, update_mask="metadata").result()
    assert "kept" not in client.get_node(name=node.name).labels
    assert subprocess.run([*argv, "id", "-un"], capture_output=True, text=True).stdout.strip() == "worker"


def test_hosts_have_metadata_and_reach_the_api_as_their_service_account(tpu: Tpu, client: Any) -> None:
    script = "#!/bin/sh\necho by $(id -un) on $(hostname)\n"
    _create(client, "pair", metadata={"startup-script": script}, scheduling_config={"spot": True}).result()
    host = tpu.workers("pair")[1]
    assert _get(tpu, host, "instance/attributes/agent-worker-number") == "1"
    assert _get(tpu, host, "instance/attributes/startup-script") == script
    log = tpu.hosts[host].own / "startup-script.log"
    until(lambda: log.read_text() == f"by root on {host}\n", "the startup script has run")
    addresses = [tpu.hosts[name].address for name in tpu.workers("pair")]
    endpoints = _get(tpu, host, "instance/attributes/worker-network-endpoints").split(",")
    assert [endpoint.split(":")[2] for endpoint in endpoints] == addresses
    etag, event = _with_etag(tpu, host, "instance/maintenance-event")
    assert event == "NONE"
    with ThreadPoolExecutor() as pool:
        query = f"wait_for_change=true&timeout_sec=60&last_etag={etag}"
        announced = pool.submit(_get, tpu, host, f"instance/maintenance-event?{query}")
        tpu.maintenance("pair")
        assert announced.result() == "TERMINATE_ON_HOST_MAINTENANCE"
    assert tpu.hosts.left(host) == ""
    # With google-auth's own way to credentials on such a machine.
    script = """
import google.auth, google.auth.transport.requests, sys
credentials, project = google.auth.default()
reply = google.auth.transport.requests.AuthorizedSession(credentials).delete(sys.argv[1])
print(project, reply.status_code, reply.json().get("name", reply.text))
"""
    unset = [word for name in tpu.env for word in ("-u", name)]
    python = ["env", *unset, sys.executable, "-c", script]
    tpu.deny("DeleteNode", caller=LAUNCHER)
    tpu.hold("DeleteNode")  # which ends this host, and what it prints
    printed = tpu.hosts[host].run(*python, f"{tpu.url}/v2/{PARENT}/nodes/pair").split()
    assert printed[:2] == [PROJECT, "200"], printed
    tpu.resume()
    tpu.wait("pair", "")
    assert [record.caller for record in tpu.calls("DeleteNode")] == [SERVICE_ACCOUNT]


def test_the_client_finds_the_rest_api_by_an_address_and_its_default_credentials(tpu: Tpu) -> None:
    with package("google.cloud.tpu_v2").TpuClient(transport="rest", client_options={"api_endpoint": tpu.url}) as rest:
        _create(rest, "a", "v4-8").result()
        assert [node.name for node in rest.list_nodes(parent=f"projects/{PROJECT}/locations/-")] == [
            f"{PARENT}/nodes/a"
        ]
        assert _refusal(rest.get_node, name=f"{PARENT}/nodes/b")[0] == "NotFound"
        tpu.deny("DeleteNode", caller=LAUNCHER)
        assert _refusal(rest.delete_node, name=f"{PARENT}/nodes/a")[0] == "Forbidden"
        tpu.down()
        with pytest.raises(package("requests.exceptions").ConnectionError):
            rest.get_node(name=f"{PARENT}/nodes/a")
        tpu.up()
        assert rest.get_node(name=f"{PARENT}/nodes/a").state.name == "READY"
    assert {record.caller for record in tpu.calls()} == {LAUNCHER}


def test_errors_are_the_services(tpu: Tpu, client: Any) -> None:
    _create(client, "a", "v4-8").result()
    assert _refusal(client.get_node, name=f"{PARENT}/nodes/x")[0] == "NotFound"
    assert _refusal(_create, client, "a", "v4-8")[0] == "AlreadyExists"
    bad = "InvalidArgument"
    assert _refusal(_create, client, "b", "v99-8")[0] == bad
    assert "was not found in zone us-central2-b" in _refusal(_create, client, "b", "v5litepod-16")[1]
    assert _refusal(_create, client, "b", parent=f"projects/{PROJECT}/locations/nowhere")[0] == bad
    assert _refusal(_create, client, "B", "v4-8")[0] == bad
    assert _refusal(_create, client, "b", "v4-8", labels={"Bad": "label"})[0] == bad
    assert _refusal(_create, client, "b", "v4-8", scheduling_config={"spot": True, "reserved": True})[0] == bad
    assert _refusal(client.start_node, request={"name": f"{PARENT}/nodes/a"})[0] == "FailedPrecondition"
    tpu.fail("GetNode", "UNAVAILABLE", times=1)
    assert _refusal(client.get_node, name=f"{PARENT}/nodes/a")[0] == "ServiceUnavailable"
    assert client.get_node(name=f"{PARENT}/nodes/a").state.name == "READY"
    tpu.quota(False)
    code, message = _refusal(_create, client, "c", "v4-8")
    assert (code, "Quota limit" in message) == ("ResourceExhausted", True)
    tpu.quota(True)
    tpu.capacity(False)
    operation = _create(client, "c", "v4-8")  # the call succeeds, its operation does not
    assert "There is no more capacity" in str(operation.exception())
    assert operation.operation.error.code == 8
    assert [node["name"] for node in tpu.nodes()] == [f"{PARENT}/nodes/a"]


def test_nodes_stop_start_and_are_preempted(tpu: Tpu, client: Any) -> None:
    config = {"type_": "V4", "topology": "1x2x2"}
    node = {"runtime_version": VERSION, "accelerator_config": config, "scheduling_config": {"spot": True}}
    made = client.create_node(parent=PARENT, node_id="a", node=node).result()
    assert (made.accelerator_type, len(made.network_endpoints)) == ("v4-8", 1)
    host = tpu.hosts[tpu.workers("a")[0]]
    host.run("touch", f"{tpu.hosts.box}/home/root/kept")
    client.stop_node(request={"name": made.name}).result()
    assert not host.alive()
    client.start_node(request={"name": made.name}).result()
    host.run("test", "-e", f"{tpu.hosts.box}/home/root/kept")
    tpu.crash("a", 0)
    assert client.get_node(name=made.name).state.name == "READY"
    tpu.preempt("a")
    assert client.get_node(name=made.name).state.name == "PREEMPTED"
    tpu.set_state("a", "TERMINATED")
    assert client.get_node(name=made.name).state.name == "TERMINATED"
    _create(client, "b", "v4-8").result()
    assert tpu.workers("b") == [host.name]
    assert not (tpu.hosts.home(host.name) / "kept").exists()
    client.delete_node(name=made.name).result()
    assert tpu.hosts[host.name].alive()
    tpu.hold("CreateNode")
    held = _create(client, "c", "v4-8")
    assert client.get_node(name=f"{PARENT}/nodes/c").state.name == "CREATING"
    client.delete_node(name=f"{PARENT}/nodes/c").result()
    assert "was deleted" in str(held.exception())


def test_queued_resources_wait_are_granted_and_suspended(tpu: Tpu, client: Any) -> None:
    tpu.capacity(False)
    _enqueue(client, "q", force_spot=True).result()
    tpu.wait("queuedResources/q", "WAITING_FOR_RESOURCES")
    tpu.grant("q")
    tpu.wait("queuedResources/q", "ACTIVE")
    name = f"{PARENT}/queuedResources/q"
    node = client.get_node(name=f"{PARENT}/nodes/q-node")
    assert (node.queued_resource, node.state.name, node.scheduling_config.spot) == (name, "READY", True)
    assert _refusal(client.delete_queued_resource, name=name)[0] == "FailedPrecondition"
    tpu.preempt("q-node")
    tpu.wait("queuedResources/q", "SUSPENDED")
    states = ["ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "SUSPENDING", "SUSPENDED"]
    assert tpu.history("queuedResources/q") == states
    assert not tpu.nodes()
    client.delete_queued_resource(name=name).result()
    assert not list(client.list_queued_resources(parent=PARENT))
    _enqueue(client, "late", queueing_policy={"valid_until_duration": {"seconds": 0}}).result()
    tpu.wait("late", "FAILED")
    assert client.get_queued_resource(name=f"{PARENT}/queuedResources/late").state.failed_data.error.code == 4
    tpu.capacity(True)
    _enqueue(client, "many", count=2).result()
    tpu.wait("many", "ACTIVE")
    assert [node["name"].rpartition("/")[2] for node in tpu.nodes()] == ["many-0", "many-1"]
    pages = client.list_nodes(request={"parent": PARENT, "page_size": 1}).pages
    assert [len(page.nodes) for page in pages] == [1, 1]
    request = {"name": f"{PARENT}/queuedResources/many", "force": True}
    client.delete_queued_resource(request=request).result()
    assert (tpu.nodes(), [known["name"] for known in tpu.queued()]) == ([], [f"{PARENT}/queuedResources/late"])


def _gcloud(tpu: Tpu, words: str, *more: str, track: tuple[str, ...] = ()) -> str:
    argv = ["gcloud", *track, "compute", "tpus", *words.split(), *more]
    done = subprocess.run(
        argv, env=tpu.gcloud_env(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gcloud_creates_a_slice_reaches_its_hosts_and_deletes_it(tpu: Tpu, client: Any) -> None:
    gcloud()
    _gcloud(
        tpu,
        "tpu-vm create pair --async --accelerator-type=v4-16 --spot",
        f"--version={VERSION}",
        "--labels=made-by=test",
    )
    tpu.wait("pair", "READY")
    node = client.get_node(name=f"{PARENT}/nodes/pair")
    assert (node.scheduling_config.spot, dict(node.labels)) == (True, {"made-by": "test"})
    assert _gcloud(tpu, "tpu-vm list --format", "value(name.basename(),state)").split() == ["pair", "READY"]
    printed = _gcloud(tpu, "tpu-vm ssh pair --worker=all --command=hostname --internal-ip --ssh-flag", "-F /dev/null")
    assert sorted(printed.split()) == tpu.workers("pair")
    known = (tpu.hosts.box / "client/.ssh/google_compute_known_hosts").read_text()
    key = client.get_guest_attributes(request={"name": node.name}).guest_attributes[1].query_value.items[0].value
    assert f"tpu.{node.id}-1-{key[-6:].lower()} ssh-ed25519 {key}" in known
    _gcloud(tpu, "tpu-vm delete pair --async")
    until(lambda: not tpu.nodes(), "the node is gone")
    assert {record.caller for record in tpu.calls("UpdateNode")} == {"gcloud"}
