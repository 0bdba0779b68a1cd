"""Code that is too large for ConfigMaps, on its way through a claim or an object store, to pods that run."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, State, SubmitError
from schedulers.errors import SpecError
from schedulers.kubernetes import code_upload as claiming
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.marks import long
from tests.needs import package
from tests.waiting import until

from ..conftest import CLAIM, Submit, printed, with_quota

SHOWN = "sha256sum data.bin; cat note.txt"
_IN_CLAIM = {"code": "auto", "code_claim": "snapshots"}
# Submits through a claim, and is killed by itself at the Nth piece of the code, or before its end is told.
CUT = """\
import os, signal, sys
import schedulers
from kubernetes.stream.ws_client import WSClient

left = int(sys.argv[1])
def step(real):
    def stepped(self, *words, **named):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *words, **named)
    return stepped
WSClient.write_channel = step(WSClient.write_channel)
WSClient.read_channel = step(WSClient.read_channel)
schedulers.submit("sh", ["-c", sys.argv[2]], entry="command", target="kubernetes", procs_per_node=1, code=".",
                  options={"cpu": True, "image": sys.argv[3], "code_claim": "snapshots"})
print("whole")
"""


@pytest.fixture
def large(project: Path) -> str:
    """The sha256 of a file of the code that does not pack into 1 MiB."""
    data = random.Random(7).randbytes(3 << 20)
    (project / "data.bin").write_bytes(data)
    return f"{hashlib.sha256(data).hexdigest()}  data.bin\ncode\n"


@pytest.fixture
def claim(kubernetes: Kubernetes, namespace: str) -> None:
    kubernetes.apply(CLAIM, namespace)


def pods(kubernetes: Kubernetes, namespace: str, job: Job) -> list[str]:
    found = [pod["metadata"]["name"] for pod in kubernetes.pods(namespace, f"accel.dev/job-id={job.id}")]
    return [name for name in found if name.endswith("-loader")]


def in_claim(submit: Submit) -> list[list[str]]:
    """Of every file in the claim its name, size and time."""
    volumes = [{"mount": "/claim", "claim": "snapshots"}]
    job = submit("stat -c '%n %s %Y' /claim/* /claim/.[!.]* 2>/dev/null; true", options={"volumes": volumes})
    assert job.wait(120).state is State.SUCCEEDED
    return [line.split() for line in printed(job).splitlines()]


def test_large_code_goes_through_a_claim(
    claim: None, large: str, submit: Submit, kubernetes: Kubernetes, namespace: str
) -> None:
    job = submit(SHOWN, nodes=2, options={**_IN_CLAIM, "workload": "job"})
    assert pods(kubernetes, namespace, job) == []
    assert job.wait(120).state is State.SUCCEEDED
    assert printed(job) == large * 2
    before = in_claim(submit)
    ((name, size, _),) = before
    assert name.endswith(".tar.gz")
    assert int(size) > 3 << 20
    again = submit(SHOWN, options=_IN_CLAIM)
    assert again.wait(120).state is State.SUCCEEDED
    assert in_claim(submit) == before  # it was there
    assert kubernetes.client.call("GET", f"/api/v1/namespaces/{namespace}/configmaps")["items"][1:] == []


def test_small_code_needs_no_claim(claim: None, submit: Submit) -> None:
    assert submit("cat note.txt", options=_IN_CLAIM).wait(120).state is State.SUCCEEDED
    assert in_claim(submit) == []


def test_large_code_without_a_place_for_it(large: str, submit: Submit) -> None:
    with pytest.raises(SpecError, match=r"the code is 3\.0 MiB, packed, and ConfigMaps hold 1 MiB"):
        submit(SHOWN, options={"code": "auto"})


def test_a_claim_that_is_not_there(large: str, submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    with pytest.raises(SubmitError, match=f"code_claim: no claim snapshots in namespace {namespace}"):
        submit(SHOWN, options=_IN_CLAIM)
    assert kubernetes.objects(namespace) == []


def test_a_pod_that_cannot_load_yet_says_why_and_goes_where_the_job_may(
    claim: None, large: str, submit: Submit, kubernetes: Kubernetes, namespace: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It keeps to the nodes that the job keeps to, and tells the quota what it uses."""
    monkeypatch.setattr(claiming, "_REPORT_S", 0.0)
    with_quota(kubernetes, namespace, {"requests.cpu": "2", "limits.memory": "2Gi"})
    label = f"accel.test/{namespace}"

    def marked(value: str | None) -> None:
        body = {"metadata": {"labels": {label: value}}}
        kubernetes.client.call("PATCH", "/api/v1/nodes/n1", body, content_type="application/merge-patch+json")

    options = {**_IN_CLAIM, "workload": "job", "suspend": True, "node_selector": {label: "yes"}}
    with ThreadPoolExecutor(max_workers=1) as pool:
        job = pool.submit(submit, SHOWN, cpus=2, memory_gb=2, options=options)
        try:
            until(lambda: job.done() or "no node fits: 0/2 nodes are available" in caplog.text, "it is said")
            assert not job.done()
            said = [text for text in caplog.messages if "to the claim: it has not started yet: " in text]
            assert len(said) == len(set(said))  # each reason once: a busy machine's nodes may be unready for a moment
        finally:
            marked("yes")  # else the pool would wait for a pod that cannot start, and hide what failed
            wait([job])
            marked(None)
        assert pods(kubernetes, namespace, job.result()) == []


def test_an_image_without_which_no_pod_can_load(
    claim: None, large: str, submit: Submit, kubernetes: Kubernetes, namespace: str
) -> None:
    with pytest.raises(SubmitError, match=r"which uploads the code to the claim: the image cannot be pulled: "):
        submit(SHOWN, options={**_IN_CLAIM, "image": "example.org/no-such:1"})
    until(lambda: kubernetes.pods(namespace) == [], "the pod is gone")


def test_an_image_without_the_interpreter(claim: None, large: str, submit: Submit) -> None:
    with pytest.raises(SubmitError, match="which uploads the code to the claim: ") as refusal:
        submit(SHOWN, options={**_IN_CLAIM, "python": "/no/such/python"})
    assert "it ended: " in str(refusal.value)


@pytest.mark.parametrize("at", [5, *long(1, 3, 9, 14)])
def test_killed_while_the_code_is_sent(
    at: int, claim: None, large: str, kubernetes: Kubernetes, namespace: str, home: Path, project: Path, submit: Submit
) -> None:
    words = [sys.executable, "-c", CUT, str(at), SHOWN, IMAGE]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=240)
    assert done.returncode == -9, done.stderr
    (record,) = schedulers.list_jobs(refresh=False)
    assert not isinstance(record, str)
    job = schedulers.find(record.id)
    assert job.wait(120).state is State.SUCCEEDED
    assert printed(job) == large
    assert pods(kubernetes, namespace, job) == []
    # A pod that is killed may leave what it was writing; nobody takes it for the code.
    found = [name for name, _, _ in in_claim(submit) if not name.endswith(".part")]
    assert [name.endswith(".tar.gz") for name in found] == [True]


def test_what_a_killed_pod_left_is_removed_later(claim: None, large: str, submit: Submit) -> None:
    volumes = [{"mount": "/claim", "claim": "snapshots"}]
    job = submit(
        "touch /claim/new.tar.gz.1.part; touch -d '2 hours ago' /claim/old.tar.gz.2.part", options={"volumes": volumes}
    )
    assert job.wait(120).state is State.SUCCEEDED
    submit(SHOWN, options={**_IN_CLAIM, "suspend": True})
    assert [Path(name).name for name, _, _ in in_claim(submit) if name.endswith(".part")] == ["new.tar.gz.1.part"]


# What the image that the option names has: `aws s3 cp SOURCE TARGET --endpoint-url URL`.
AWS = """\
#!{python}
import os
import sys
import boto3
source, target = [word for word in sys.argv[3:] if not word.startswith("--")][:2]
bucket, _, key = source.removeprefix("s3://").partition("/")
client = boto3.client("s3", endpoint_url=sys.argv[sys.argv.index("--endpoint-url") + 1])
os.makedirs(os.path.dirname(target), exist_ok=True)
client.download_file(bucket, key, target)
"""


@pytest.fixture
def store(
    kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[dict[str, Any], Any]]:
    """Options of an object store that pods can reach, and a client of it."""
    boto3 = package("boto3")
    server_module = package("moto.server")
    for name, value in {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    server = server_module.ThreadedMotoServer(ip_address=kubernetes.control.address, port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        client = boto3.client("s3", endpoint_url=endpoint)
        client.create_bucket(Bucket="snapshots")
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": keys}
        kubernetes.apply(secret, namespace)
        program = {"aws": AWS.format(python=sys.executable)}
        kubernetes.apply(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "aws"}, "data": program}, namespace
        )
        place = {"url": "s3://snapshots/team", "image": IMAGE, "endpoint": endpoint, "secret": "keys"}
        path = [{"name": "PATH", "value": f"/tools:{sys.prefix}/bin:/usr/bin:/bin"}]
        fetch = {"name": "accel-fetch", "env": path, "volumeMounts": [{"name": "tools", "mountPath": "/tools"}]}
        tools = {"name": "tools", "configMap": {"name": "aws", "defaultMode": 0o755}}
        patch = {"spec": {"initContainers": [fetch], "volumes": [tools]}}
        yield {"code": "auto", "code_store": place, "pod_patch": patch}, client
    finally:
        server.stop()


def test_large_code_goes_through_an_object_store(store: tuple[dict[str, Any], Any], large: str, submit: Submit) -> None:
    options, client = store
    job = submit(SHOWN, options=options)
    status = job.wait(120)
    assert status.state is State.SUCCEEDED, status
    assert printed(job) == large
    (found,) = client.list_objects_v2(Bucket="snapshots")["Contents"]
    assert found["Key"].startswith("team/")
    assert found["Key"].endswith(".tar.gz")
    submit(SHOWN, options={**options, "suspend": True})
    (still,) = client.list_objects_v2(Bucket="snapshots")["Contents"]
    assert still["LastModified"] == found["LastModified"]  # it was there


def test_an_object_store_that_refuses(store: tuple[dict[str, Any], Any], large: str, submit: Submit) -> None:
    options, _ = store
    place = {**options["code_store"], "url": "s3://no-such-bucket/team"}
    with pytest.raises(SubmitError, match=r"code_store s3://no-such-bucket/team: NoSuchBucket: The specified bucket"):
        submit(SHOWN, options={**options, "code_store": place})
    place = {**options["code_store"], "endpoint": "http://127.0.0.1:1"}
    with pytest.raises(SubmitError, match=r'Could not connect to the endpoint URL: "http://127.0.0.1:1/'):
        submit(SHOWN, options={**options, "code_store": place})


def test_no_credentials_for_the_object_store(
    store: tuple[dict[str, Any], Any], large: str, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(SubmitError, match="Unable to locate credentials"):
        submit(SHOWN, options=store[0])
