"""deploy/sagemaker: its policies allow the calls that the life of a job makes, and no others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

import pytest

import schedulers
from schedulers import Job, State
from schedulers.errors import SubmitError
from schedulers.jobs.prune import prune
from schedulers.sagemaker import s3
from schedulers.store.store import Store
from tests.clusters.sagemaker import SageMaker

from .conftest import target_options
from .test_shell import plugin
from .test_training import ROOT, runs

__all__ = ["plugin"]

HERE = ROOT / "deploy/sagemaker"
# Calls whose right has another name, or that need several.
# https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html
RIGHTS: Mapping[str, tuple[str, ...]] = {
    "s3:CompleteMultipartUpload": ("s3:PutObject",),
    "s3:CopyObject": ("s3:GetObject", "s3:PutObject"),
    "s3:CreateMultipartUpload": ("s3:PutObject",),
    "s3:HeadBucket": ("s3:ListBucket",),
    "s3:HeadObject": ("s3:GetObject",),
    "s3:ListMultipartUploads": ("s3:ListBucketMultipartUploads",),
    "s3:ListObjectsV2": ("s3:ListBucket",),
    "s3:ListParts": ("s3:ListMultipartUploadParts",),
    "s3:UploadPart": ("s3:PutObject",),
    "s3:UploadPartCopy": ("s3:GetObject", "s3:PutObject"),
    # The tags and the role in it.
    "sagemaker:CreateTrainingJob": ("sagemaker:CreateTrainingJob", "sagemaker:AddTags", "iam:PassRole"),
    # The plug-in ends the session.
    "ssm:StartSession": ("ssm:StartSession", "ssm:TerminateSession"),
}
# What SageMaker does with the role where the endpoint does not: it pulls the image, sends metrics, and runs an agent.
# https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-roles.html#sagemaker-roles-createtrainingjob-perms
# https://docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html
AWS_OWN = {
    "cloudwatch:PutMetricData", "ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetAuthorizationToken",
    "ecr:GetDownloadUrlForLayer", "logs:DescribeLogStreams", "ssmmessages:CreateControlChannel",
    "ssmmessages:CreateDataChannel", "ssmmessages:OpenControlChannel", "ssmmessages:OpenDataChannel",
}  # fmt: skip
# Rights that IAM cannot limit to a resource; Session Manager's is limited by a condition.
ANYWHERE = {
    "cloudwatch:PutMetricData", "ecr:GetAuthorizationToken", "sagemaker:ListTrainingJobs", "ssm:StartSession",
    "ssm:TerminateSession", "sts:GetCallerIdentity", *(each for each in AWS_OWN if each.startswith("ssmmessages:")),
}  # fmt: skip
NAMES = {
    "account": "123456789012", "bucket": "results", "partition": "aws", "region": "us-east-1", "role": "training",
    "secrets": "accel/",
}  # fmt: skip
# A job that leaves a checkpoint and a model, and waits.
_SCRIPT = "echo 1 >/opt/ml/checkpoints/1; echo 1 >$SM_MODEL_DIR/weights; echo up; sleep 600"


def statements(name: str) -> list[dict[str, Any]]:
    policy = json.loads(Template((HERE / name).read_text()).substitute(NAMES))
    found: list[dict[str, Any]] = policy["Statement"]
    return found


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allowed(name: str) -> set[str]:
    return {action for statement in statements(name) for action in listed(statement["Action"])}


def needed(sagemaker: SageMaker, caller: str, more: Iterable[str] = ()) -> set[str]:
    """The rights that the recorded calls of a caller need."""
    calls = {f"{call.service}:{call.operation}" for call in sagemaker.calls(caller=caller)}
    return {*more, *(right for call in calls for right in RIGHTS.get(call, (call,)))}


def test_the_life_of_a_job_needs_what_they_allow(
    sagemaker: SageMaker, home: Path, project: Path, plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "data.bin").write_bytes(random.Random(3).randbytes(18 << 20))  # more than one part
    sagemaker.client("ssm").put_parameter(Name="/accel/key", Value="hush", Type="SecureString")
    sagemaker.client("secretsmanager").create_secret(Name="accel/login", SecretString="hush")
    options = target_options(
        sagemaker, role=sagemaker.role.rpartition("/")[2], enable_remote_debug=True, output_compression_type="NONE",
        checkpoint_s3_uri=f"s3://{sagemaker.bucket}/checkpoints",
    )  # fmt: skip

    def submit() -> Job:
        return schedulers.submit(
            "sh", ["-c", _SCRIPT], entry="command", target="sagemaker", procs_per_node=1, cwd=project, options=options,
            time_limit_s=600.0, grace_s=2.0, secrets={"A": "ssm:/accel/key", "B": "secretsmanager:accel/login"},
        )  # fmt: skip

    sagemaker.fail("s3:CompleteMultipartUpload", "AccessDenied", "no", status=403)
    with pytest.raises(SubmitError, match="AWS does not allow s3:CompleteMultipartUpload"):
        submit()
    job = submit()
    runs(job, "up\n")
    assert job.shell(0) == 7
    target: Any = job.waiting_target()
    assert target.review(job.record.plan()) == []  # --dry-run=server
    assert [each.job_id for each in target.listed()] == [job.id]
    assert target.find(job.id) is not None
    native = str(job.native_id)
    assert len(target.poll([native, native.replace(job.id, "2mxaaaaaaaa")])) == 2  # accel list
    assert job.cancel().state is State.CANCELLED
    assert job.fetch(tmp_path / "fetched") == ["model"]
    sagemaker.client("s3").create_multipart_upload(Bucket=sagemaker.bucket, Key="team/accel/content/abc")
    monkeypatch.setattr(s3, "_ORPHAN_S", -1.0)
    assert prune(Store.default(), ids=[job.id]).kept_reasons == ()
    assert needed(sagemaker, "launcher") == allowed("launcher.json")
    assert needed(sagemaker, "execution-role", AWS_OWN) == allowed("execution.json")


@pytest.mark.parametrize("name", ["launcher.json", "execution.json"])
def test_rights_are_limited_where_iam_can(name: str) -> None:
    for statement in statements(name):
        unlimited = "*" in listed(statement["Resource"])
        assert {unlimited} == {action in ANYWHERE for action in listed(statement["Action"])}, statement
    rights = [right for statement in statements(name) for right in listed(statement["Action"])]
    assert len(rights) == len(set(rights))
    assert not [right for right in rights if "*" in right]


def test_the_role_is_passed_to_sagemaker_alone() -> None:
    (passing,) = [each for each in statements("launcher.json") if each["Action"] == "iam:PassRole"]
    assert passing["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}
    assert passing["Resource"] == "arn:aws:iam::123456789012:role/training"


def test_iam_takes_them(sagemaker: SageMaker) -> None:
    """moto's IAM validates documents: words, ARNs, conditions."""
    iam = sagemaker.client("iam")
    iam.create_role(RoleName="training", AssumeRolePolicyDocument=(HERE / "trust.json").read_text())
    for name in ("launcher.json", "execution.json"):
        document = json.dumps({"Version": "2012-10-17", "Statement": statements(name)})
        iam.put_role_policy(RoleName="training", PolicyName=name.partition(".")[0], PolicyDocument=document)
