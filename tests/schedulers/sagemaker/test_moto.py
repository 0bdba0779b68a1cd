"""SageMaker as moto imitates it, with other texts than AWS's, and an endpoint that never answers."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import types
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Reason, State, Store
from schedulers.errors import NotReady, Unreachable
from schedulers.sagemaker import aws, request
from schedulers.sagemaker import submit as submission
from schedulers.sagemaker.target import SageMakerTarget
from schedulers.target import TargetContext
from tests.needs import package

from .support import ROLE, options, spec

_KEYS = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret", "DEFAULT_REGION": "us-east-1"}
_ELSEWHERE = {"EC2_METADATA_DISABLED": "true", "CONFIG_FILE": "/nowhere", "SHARED_CREDENTIALS_FILE": "/nowhere"}


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**_KEYS, **_ELSEWHERE}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def moto(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of SageMaker in an account with one bucket, `results`."""
    boto3 = package("boto3")
    server = package("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
        boto3.client("s3").create_bucket(Bucket="results")
        yield boto3.client("sagemaker")
    finally:
        server.stop()


@pytest.fixture
def silent(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """The connections of an endpoint that accepts and never answers."""
    accepted: list[socket.socket] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])

    thread = threading.Thread(target=accept)
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        yield accepted
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (listener, *accepted):
            connection.close()


def test_a_job_from_its_submit_to_its_end(
    home: Path, project: Path, moto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of the first submit is lost, after which it is unknown whether AWS has the job."""
    (project / "train.py").write_text("")
    job_id = Store(home).new_id()
    (home / "jobs" / job_id).mkdir(parents=True)
    target_options = options(image="team/train:1")
    target = SageMakerTarget(TargetContext(name="aws", options=target_options, jobs=home / "jobs"))
    plan = target.plan(spec(code=str(project)), job_id)
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", "http://127.0.0.1:1")
    with pytest.raises(Unreachable, match="sagemaker:CreateTrainingJob"):
        target.submit(plan)
    monkeypatch.delenv("AWS_ENDPOINT_URL_SAGEMAKER")
    target = SageMakerTarget(TargetContext(name="aws", options=target_options, jobs=home / "jobs"))
    native_id = target.submit(plan)
    assert target.submit(plan).rpartition("/")[0] == native_id.rpartition("/")[0]
    assert [job["TrainingJobName"] for job in moto.list_training_jobs()["TrainingJobSummaries"]] == [f"train-{job_id}"]
    assert target.poll([native_id])[native_id].state is State.SUCCEEDED
    gone = native_id.replace("train-", "other-")
    assert target.poll([gone])[gone].reason is Reason.LOST
    with pytest.raises(NotReady, match="AWS has no such training job"):
        target.fetch(gone, home / "results")


def test_a_cancel_waits_for_the_grace_period_of_aws(home: Path, project: Path, moto: Any) -> None:
    (project / "train.py").write_text("")
    target_options = {
        "role": ROLE,
        "image": "team/train:1",
        "instance_type": "ml.m5.xlarge",
        "s3_output_path": "s3://results",
    }
    job = schedulers.submit("train.py", target="sagemaker", cwd=project, options=target_options, time_limit_s=600.0)
    assert job.spec.grace_s == 30.0
    assert job.cancel_timeout_s == 180.0


def test_only_jobs_whose_names_end_in_an_id_are_operations_for_their_tags(
    moto: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Store("/nowhere").new_id()
    least = request.build(spec(), request.resolved(options(), region="us-east-1"), own, "aws")
    del least["Tags"]
    for tail in (own, "20261127", "20261127-1200", "pipelineabc", "zzzzzzzzzzz", "x2mx1234567"):
        moto.create_training_job(
            **{**least, "TrainingJobName": f"train-{tail}"}, Tags=[{"Key": "accel.dev/job-id", "Value": tail}]
        )
    operations: list[str] = []
    real = aws.Aws.call

    def call(self: aws.Aws, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        operations.append(operation)
        return real(self, service, operation, **parameters)

    monkeypatch.setattr(aws.Aws, "call", call)
    assert [job.job_id for job in submission.list_jobs(aws.Aws(options(), "aws"))] == [own]
    assert operations.count("list_tags") == 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda client: client.call("sts", "get_caller_identity"), "sts:GetCallerIdentity"),
        (lambda client: client.call("s3", "head_bucket", Bucket="results"), "s3:HeadBucket"),
        (lambda client: client.training_job("train"), "sagemaker:DescribeTrainingJob"),
    ],
    ids=["sts", "s3", "the SDK"],
)
def test_an_endpoint_that_never_answers(
    silent: list[socket.socket], monkeypatch: pytest.MonkeyPatch, call: Callable[[aws.Aws], object], said: str
) -> None:
    package("boto3")
    assert aws.ATTEMPTS * (aws.CONNECT_S + aws.REPLY_S) + 3.0 <= 60.0  # botocore's longest pauses between so many
    monkeypatch.setattr(aws, "REPLY_S", 0.1)
    for name in ("sagemaker", "sagemaker.core", "sagemaker.core.resources"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["sagemaker.core.resources"], "TrainingJob", _TrainingJob, raising=False)
    with pytest.raises(Unreachable, match=f"target aws: {said}: Read timeout"):
        call(aws.Aws(options(), "aws"))
    assert len(silent) == aws.ATTEMPTS


class _TrainingJob:
    """As the SDK's, whose client has a configuration of its own."""

    @staticmethod
    def get(training_job_name: str, session: Any, region: str) -> None:
        config = package("botocore.config").Config(user_agent_extra="sdk")
        client = session.client("sagemaker", region_name=region, config=config)
        client.describe_training_job(TrainingJobName=training_job_name)


def test_transfers_to_s3_have_longer(credentials: None) -> None:
    package("boto3")
    client = aws.Aws(options(), "aws").client
    limits = [client("s3", transfers=transfers).meta.config.read_timeout for transfers in (False, True)]
    assert limits == [aws.REPLY_S, 60]
