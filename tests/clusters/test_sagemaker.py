"""The tests' SageMaker endpoint is what AWS documents."""

from __future__ import annotations

import io
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.sagemaker import SageMaker
from tests.needs import package
from tests.waiting import until

ROOT = Path(__file__).parents[2]
TYPE = "ml.m5.large"
PYTHON = ["python3", "/opt/ml/input/data/code/train.py"]

# Each host sends the other its name, so that both have seen the network, and says what it sees of the machine.
CONTRACT = """
import importlib.util, json, os, pathlib, socket, sys
config = pathlib.Path("/opt/ml/input/config")
resources = json.loads((config / "resourceconfig.json").read_text())
host = resources["current_host"]
other = next(name for name in resources["hosts"] if name != host)
with socket.create_server(("", 7777)) as server:
    while True:
        try:
            socket.create_connection((other, 7777)).close()
            break
        except OSError:
            pass
    server.accept()
print(json.dumps({
    "hosts": resources["hosts"],
    "hyperparameters": json.loads((config / "hyperparameters.json").read_text()),
    "channels": json.loads((config / "inputdataconfig.json").read_text()),
    "env": dict(os.environ),
    "pid": os.getpid(),
    "importable": [name for name in ("torch", "accel", "schedulers") if importlib.util.find_spec(name)],
    "checkout": os.listdir(sys.argv[1]) if os.path.exists(sys.argv[1]) else [],
    "tmp": os.listdir("/tmp"),
}))
pathlib.Path("/opt/ml/model", host).write_text(host)
pathlib.Path("/opt/ml/output/data/metrics").write_text(host)
"""

# Counts up in its checkpoint; the first attempt ends by a signal.
RESUME = """
import pathlib, signal, sys, time
directory = pathlib.Path("/opt/ml/checkpoints")
old = sorted(path.name for path in directory.iterdir())
print("restored", *old, flush=True)
if old:
    pathlib.Path("/opt/ml/model/restored").write_text(" ".join(old))
    sys.exit()
host = (pathlib.Path("/opt/ml/input/config/resourceconfig.json").read_text().split('"current_host": "')[1])[:6]
(directory / f"first-{host}").touch()
signal.signal(signal.SIGTERM, lambda *_: [(directory / f"late-{host}-{n}").touch() for n in range(4)] and sys.exit())
signal.pause()
"""


def _request(sagemaker: SageMaker, name: str, *command: str, count: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "TrainingJobName": name,
        "RoleArn": sagemaker.role,
        "AlgorithmSpecification": {
            "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/image:1",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": list(command) or ["true"],
        },
        "OutputDataConfig": {"S3OutputPath": f"s3://{sagemaker.bucket}/out"},
        "ResourceConfig": {"InstanceType": TYPE, "InstanceCount": count, "VolumeSizeInGB": 10},
        "StoppingCondition": {"MaxRuntimeInSeconds": 600},
        **more,
    }


def _code(sagemaker: SageMaker, text: str) -> dict[str, Any]:
    sagemaker.client("s3").put_object(Bucket=sagemaker.bucket, Key="code/train.py", Body=text.encode())
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{sagemaker.bucket}/code"}
    return {"InputDataConfig": [{"ChannelName": "code", "DataSource": {"S3DataSource": source}}]}


def _create(sagemaker: SageMaker, name: str, *command: str, **more: Any) -> None:
    sagemaker.client("sagemaker").create_training_job(**_request(sagemaker, name, *command, **more))


def _lines(sagemaker: SageMaker, name: str) -> list[str]:
    return [line for lines in sagemaker.logs(name).values() for line in lines]


def _states(job: dict[str, Any]) -> list[str]:
    assert all(entry["StartTime"] <= entry["EndTime"] for entry in job["SecondaryStatusTransitions"])
    return [entry["Status"] for entry in job["SecondaryStatusTransitions"]]


def _files(sagemaker: SageMaker, key: str) -> dict[str, str]:
    body = sagemaker.client("s3").get_object(Bucket=sagemaker.bucket, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        return {name: (tar.extractfile(name) or io.BytesIO()).read().decode() for name in tar.getnames()}


def _refusal(sagemaker: SageMaker, request: dict[str, Any]) -> tuple[str, str]:
    options = package("botocore.config").Config(parameter_validation=False, retries={"total_max_attempts": 1})
    with pytest.raises(package("botocore.exceptions").ClientError) as caught:
        sagemaker.client("sagemaker", config=options).create_training_job(**request)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_two_instances_complete_with_a_model(sagemaker: SageMaker) -> None:
    more = {"HyperParameters": {"lr": "1e-3"}, "Environment": {"MINE": "a\nb"}, **_code(sagemaker, CONTRACT)}
    _create(sagemaker, "pair", *PYTHON, str(ROOT), count=2, **more)
    job = sagemaker.wait("pair", "Completed", "Failed")
    assert _states(job) == ["Starting", "Downloading", "Training", "Uploading", "Completed"], job.get("FailureReason")
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{sagemaker.bucket}/out/pair/output/model.tar.gz"
    assert _files(sagemaker, "out/pair/output/model.tar.gz") == {"algo-1": "algo-1", "algo-2": "algo-2"}
    assert _files(sagemaker, "out/pair/output/output.tar.gz") == {"metrics": "algo-1"}
    assert job["BillableTimeInSeconds"] == job["TrainingTimeInSeconds"] >= 1
    logs = sagemaker.logs("pair")
    assert sorted(name.rpartition("-")[0] for name in logs) == ["algo-1", "algo-2"]
    # Mount points of the checkout and of the environment, which may be anywhere below /tmp.
    shown = {path.parts[2] for path in (ROOT, Path(sys.prefix)) if path.is_relative_to("/tmp")}
    for [line] in logs.values():
        seen = json.loads(line)
        assert seen["hosts"] == ["algo-2", "algo-1"]
        assert seen["hyperparameters"] == {"lr": "1e-3"}
        assert seen["channels"]["code"]["TrainingInputMode"] == "File"
        assert seen["env"]["TRAINING_JOB_NAME"] == "pair"
        assert seen["env"]["TRAINING_JOB_ARN"] == job["TrainingJobArn"]
        assert seen["env"]["MINE"] == "a\nb"
        assert "PYTEST_CURRENT_TEST" not in seen["env"]
        assert seen["pid"] == 1
        assert seen["importable"] == ["torch"]
        assert seen["checkout"] in ([], [".venv"])
        assert set(seen["tmp"]) <= shown
    service = {f"{call.service}:{call.operation}" for call in sagemaker.calls(caller="execution-role")}
    assert {"s3:ListObjectsV2", "s3:GetObject", "s3:PutObject", "logs:CreateLogStream"} <= service
    assert [call.operation for call in sagemaker.calls("s3", caller="test")] == ["PutObject", "GetObject", "GetObject"]


def test_groups_shards_file_systems_and_outputs_that_are_not_compressed(sagemaker: SageMaker) -> None:
    for number in range(3):
        sagemaker.client("s3").put_object(Bucket=sagemaker.bucket, Key=f"data/{number}", Body=b"")
    shards = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{sagemaker.bucket}/data/"}
    efs = {
        "FileSystemId": "fs-0123456789",
        "FileSystemAccessMode": "rw",
        "FileSystemType": "EFS",
        "DirectoryPath": "/d",
    }
    channels = [
        {"ChannelName": "data", "DataSource": {"S3DataSource": {**shards, "S3DataDistributionType": "ShardedByS3Key"}}},
        {"ChannelName": "shared", "DataSource": {"FileSystemDataSource": efs}},
    ]
    groups = [
        {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": 1}
        for name, kind in (("big", TYPE), ("small", "ml.t3.medium"))
    ]
    script = "cd /opt/ml; h=$(sed 's/.*current_group_name.: .//;s/\\W.*//' input/config/resourceconfig.json);"
    script += " cd input/data; touch shared/$h; until [ -e shared/big -a -e shared/small ]; do :; done;"
    _create(sagemaker, "groups", "sh", "-c", script + " ls data >/opt/ml/model/$h; touch /opt/ml/output/data/$h",
            InputDataConfig=channels, ResourceConfig={"InstanceGroups": groups, "VolumeSizeInGB": 1},
            OutputDataConfig={"S3OutputPath": f"s3://{sagemaker.bucket}/", "CompressionType": "NONE"})  # fmt: skip
    job = sagemaker.wait("groups", "Completed", "Failed")
    prefix = "groups/output/"
    assert job["ModelArtifacts"]["S3ModelArtifacts"] == f"s3://{sagemaker.bucket}/{prefix}model/"
    listed = sagemaker.client("s3").list_objects_v2(Bucket=sagemaker.bucket, Prefix=prefix)["Contents"]
    names = [entry["Key"].removeprefix(prefix) for entry in listed]
    assert names == ["data/big", "data/small", "model/big", "model/small"]
    bodies = [sagemaker.client("s3").get_object(Bucket=sagemaker.bucket, Key=prefix + name) for name in names[2:]]
    assert [body["Body"].read() for body in bodies] == [b"0\n2\n", b"1\n"]


def test_a_failure_has_its_reason_and_ends_the_other_host(sagemaker: SageMaker) -> None:
    script = "grep -q host.*algo-1 /opt/ml/input/config/resourceconfig.json"
    script += " && grep -q 'current_host\": \"algo-2' /opt/ml/input/config/resourceconfig.json || exec sleep 1000;"
    script += " printf %01100d 7 >/opt/ml/output/failure; exit 3"
    sagemaker.configure(grace_s=0)
    _create(sagemaker, "fails", "sh", "-c", script, count=2)
    job = sagemaker.wait("fails", "Completed", "Failed")
    assert _states(job)[-2:] == ["Uploading", "Failed"]
    assert job["FailureReason"] == f"AlgorithmError: {'0' * 1024}, exit code: 3"
    objects = sagemaker.client("s3").list_objects_v2(Bucket=sagemaker.bucket)
    assert "Contents" not in objects


def test_a_container_that_is_killed_has_the_exit_code_of_docker(sagemaker: SageMaker) -> None:
    _create(sagemaker, "killed", "sh", "-c", "echo ready; exec sleep 1000")
    until(lambda: _lines(sagemaker, "killed") == ["ready"], "the container is ready")
    sagemaker.run("killed", "algo-1", "pkill", "-9", "-f", "^sleep 1000")
    assert sagemaker.wait("killed", "Failed")["FailureReason"] == "AlgorithmError: , exit code: 137"
    assert _lines(sagemaker, "killed") == ["ready"]


def test_stop_warns_and_kills_after_the_grace_period(sagemaker: SageMaker) -> None:
    sagemaker.configure(grace_s=1)
    script = "trap 'echo warned; echo x >/opt/ml/model/late' TERM; echo ready; while :; do sleep 0.05; done"
    _create(sagemaker, "stopped", "sh", "-c", script)
    until(lambda: _lines(sagemaker, "stopped") == ["ready"], "the container is ready")
    client = sagemaker.client("sagemaker")
    client.stop_training_job(TrainingJobName="stopped")
    job = sagemaker.wait("stopped", "Stopped")
    assert _states(job)[-4:] == ["Training", "Stopping", "Uploading", "Stopped"]
    assert _lines(sagemaker, "stopped") == ["ready", "warned"]
    assert _files(sagemaker, "out/stopped/output/model.tar.gz") == {"late": "x\n"}
    with pytest.raises(client.exceptions.ClientError, match=r"rejected because the training job is in status Stopped"):
        client.stop_training_job(TrainingJobName="stopped")


def test_limits_of_time(sagemaker: SageMaker) -> None:
    limits = {"MaxRuntimeInSeconds": 1}
    _create(sagemaker, "runs", "python3", "-c", "import signal; signal.signal(15, exit); signal.pause()",
            StoppingCondition=limits)  # fmt: skip
    assert sagemaker.wait("runs", "Stopped", "Completed")["SecondaryStatus"] == "MaxRuntimeExceeded"
    sagemaker.configure(capacity=False)
    spot = {"EnableManagedSpotTraining": True, "StoppingCondition": {**limits, "MaxWaitTimeInSeconds": 1}}
    _create(sagemaker, "waits", **spot)
    job = sagemaker.wait("waits", "Stopped", "Completed")
    assert _states(job) == ["Starting", "Starting", "MaxWaitTimeExceeded"]


def test_an_interruption_keeps_the_checkpoints_that_reached_s3(sagemaker: SageMaker) -> None:
    more = {
        "CheckpointConfig": {"S3Uri": f"s3://{sagemaker.bucket}/checkpoints/"},
        "EnableManagedSpotTraining": True,
        "StoppingCondition": {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 60},
    }
    _create(sagemaker, "spot", *PYTHON, count=2, **more, **_code(sagemaker, RESUME))
    s3 = sagemaker.client("s3")

    def keys() -> list[str]:
        listed = s3.list_objects_v2(Bucket=sagemaker.bucket, Prefix="checkpoints/").get("Contents", [])
        return [entry["Key"].removeprefix("checkpoints/") for entry in listed]

    until(lambda: len(keys()) == 2, "both hosts' checkpoints are in S3")
    sagemaker.hold_checkpoints("spot")
    sagemaker.interrupt("spot", files=1)
    job = sagemaker.wait("spot", "Completed", "Failed")
    attempt = ["Starting", "Downloading", "Training"]
    assert _states(job) == [*attempt, "Interrupted", *attempt, "Uploading", "Completed"], job.get("FailureReason")
    assert len(keys()) == 4  # one more of each host's
    assert _files(sagemaker, "out/spot/output/model.tar.gz") == {"restored": " ".join(keys())}
    assert len(sagemaker.logs("spot")) == 4
    assert job["BillableTimeInSeconds"] <= job["TrainingTimeInSeconds"]


def test_an_internal_error_restarts_a_job_as_often_as_it_says(sagemaker: SageMaker) -> None:
    _create(sagemaker, "retried", "sleep", "1000", RetryStrategy={"MaximumRetryAttempts": 1})
    sagemaker.wait("retried", "Training")
    sagemaker.crash("retried")
    until(lambda: "Restarting" in [entry["Status"] for entry in
          sagemaker.describe("retried")["SecondaryStatusTransitions"]], "a restart")  # fmt: skip
    sagemaker.wait("retried", "Training")
    sagemaker.crash("retried")
    assert sagemaker.wait("retried", "Failed")["FailureReason"].startswith("InternalServerError: ")


def test_data_that_is_not_there_fails_the_job(sagemaker: SageMaker) -> None:
    channels = _code(sagemaker, "")["InputDataConfig"]
    for name, url, reason in (
        ("no-bucket", "s3://nowhere/data", "ClientError: Data download failed:NoSuchBucket"),
        ("no-object", f"s3://{sagemaker.bucket}/other", "ClientError: Data download failed:No S3 objects found"),
    ):
        channels[0]["DataSource"]["S3DataSource"]["S3Uri"] = url
        _create(sagemaker, name, InputDataConfig=channels)
        assert sagemaker.wait(name, "Failed")["FailureReason"].startswith(reason)
    _create(sagemaker, "no-output", "touch", "/opt/ml/model/x", OutputDataConfig={"S3OutputPath": "s3://nowhere/out"})
    reason = sagemaker.wait("no-output", "Failed")["FailureReason"]
    assert reason.startswith("ClientError: Artifact upload failed:NoSuchBucket")


SPOT = {"EnableManagedSpotTraining": True}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"TrainingJobName": "-x"}, r"at 'trainingJobName' failed .* Member must satisfy regular expression pattern"),
    ({"TrainingJobName": "x" * 64}, r"2 validation errors detected: .* length less than or equal to 63"),
    ({"OutputDataConfig": None}, r"Value at 'outputDataConfig' failed to satisfy constraint: Member must not be null"),
    ({"AlgorithmSpecification": None}, r"AlgorithmSpecification is required"),
    ({"RoleArn": "arn:aws:iam::123456789012:role/nobody"}, r"Could not assume role .*/nobody"),
    ({"Environment": {"A": "x" * 513}}, r"at 'environment.A.member' failed .* length less than or equal to 512"),
    ({"Environment": {"A-B": "x"}}, r"Value 'A-B' at 'environment.key' failed"),
    ({"HyperParameters": {str(n): "" for n in range(101)}}, r"at 'hyperParameters' failed .* or equal to 100"),
    ({"Tags": [{"Key": "schlüssel ok", "Value": "no#"}]}, r"Value 'no#' at 'tags.1.member.value' failed"),
    ({"RetryStrategy": {"MaximumRetryAttempts": 31}}, r"Member must have value less than or equal to 30"),
    ({"OutputDataConfig": {"S3OutputPath": "/tmp/x"}}, r"at 'outputDataConfig.s3OutputPath' failed"),
    ({"StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 8}, **SPOT}, r"Invalid MaxWaitTime"),
    ({"StoppingCondition": {"MaxRuntimeInSeconds": 9, "MaxWaitTimeInSeconds": 9}}, r"must not be set when"),
    (SPOT, r"MaxWaitTimeInSeconds is required"),
    ({"ResourceConfig": {"InstanceType": TYPE, "InstanceCount": 0}}, r"InstanceCount must be greater than"),
    ({"Tags": [{"Key": "a", "Value": "1"}, {"Key": "a", "Value": "2"}]}, r"Duplicate tag keys"),
]  # fmt: skip


def test_invalid_requests(sagemaker: SageMaker) -> None:
    for change, message in INVALID:
        request = {**_request(sagemaker, "invalid"), **change}
        code, text = _refusal(sagemaker, {key: value for key, value in request.items() if value is not None})
        assert code == "ValidationException", (change, text)
        assert re.search(message, text), text
    assert sagemaker.client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []


def test_refusals_that_a_test_asks_for(sagemaker: SageMaker) -> None:
    request = _request(sagemaker, "one")
    sagemaker.throttle("sagemaker:CreateTrainingJob")
    assert _refusal(sagemaker, request)[0] == "ThrottlingException"
    sagemaker.quota("ml.new.type", 1)
    large = {**request, "ResourceConfig": {"InstanceType": "ml.new.type", "InstanceCount": 2}}
    code, message = _refusal(sagemaker, large)
    assert (code, "'ml.new.type for training job usage' is 1 Instances" in message) == ("ResourceLimitExceeded", True)
    sagemaker.client("sagemaker").create_training_job(**request)
    assert _refusal(sagemaker, request)[0] == "ResourceInUse"
    sagemaker.fail("s3:PutObject", "AccessDenied", "Access <Denied>", status=403)
    sagemaker.fail("sts:GetCallerIdentity", "ExpiredToken", "The security token included in the request is expired")
    error = package("botocore.exceptions").ClientError
    with pytest.raises(error, match=r"AccessDenied.*Access <Denied>"):
        sagemaker.client("s3").put_object(Bucket=sagemaker.bucket, Key="x", Body=b"")
    with pytest.raises(error, match="ExpiredToken"):
        sagemaker.client("sts").get_caller_identity()
    assert sagemaker.client("sts").get_caller_identity()["Account"] == sagemaker.account
    sagemaker.deny("s3:PutObject")
    results = sagemaker.client("iam").simulate_principal_policy(
        PolicySourceArn=sagemaker.role, ActionNames=["s3:PutObject", "s3:GetObject"]
    )["EvaluationResults"]
    assert [result["EvalDecision"] for result in results] == ["implicitDeny", "allowed"]


def test_lists_and_tags(sagemaker: SageMaker) -> None:
    client = sagemaker.client("sagemaker")
    sagemaker.configure(capacity=False)
    for name in ("a-1", "b-2", "a-3"):
        _create(sagemaker, name, Tags=[{"Key": "name", "Value": name}])
    first = client.list_training_jobs(MaxResults=2, NameContains="-", SortOrder="Descending")
    names = [summary["TrainingJobName"] for summary in first["TrainingJobSummaries"]]
    assert names == ["a-3", "b-2"]
    assert {"SecondaryStatus", "LastModifiedTime"} <= first["TrainingJobSummaries"][0].keys()
    _create(sagemaker, "z-4")  # comes between two pages
    second = client.list_training_jobs(NextToken=first["NextToken"], SortOrder="Descending")
    assert [summary["TrainingJobName"] for summary in second["TrainingJobSummaries"]] == ["a-1"]
    assert "NextToken" not in second
    created = client.describe_training_job(TrainingJobName="a-1")["CreationTime"]
    later = client.list_training_jobs(CreationTimeAfter=created, NameContains="a", SortBy="Name")
    assert [summary["TrainingJobName"] for summary in later["TrainingJobSummaries"]] == ["a-1", "a-3"]
    client.stop_training_job(TrainingJobName="b-2")
    sagemaker.wait("b-2", "Stopped")
    stopped = client.list_training_jobs(StatusEquals="Stopped")["TrainingJobSummaries"]
    assert [summary["TrainingJobName"] for summary in stopped] == ["b-2"]
    arn = first["TrainingJobSummaries"][0]["TrainingJobArn"]
    client.add_tags(ResourceArn=arn, Tags=[{"Key": "x", "Value": "1"}, {"Key": "name", "Value": "new"}])
    tags = {tag["Key"]: tag["Value"] for tag in client.list_tags(ResourceArn=arn)["Tags"]}
    assert tags == {"name": "new", "x": "1"}
    with pytest.raises(client.exceptions.ClientError, match=r"ValidationException.*Requested resource not found\."):
        client.describe_training_job(TrainingJobName="nothing")
    west = sagemaker.client("sagemaker", region_name="us-west-2")
    assert west.list_training_jobs()["TrainingJobSummaries"] == []
