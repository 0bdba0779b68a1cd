"""Submission of a job to SageMaker, files to S3 and then one call, and discovery of existing jobs."""

from __future__ import annotations

import importlib.resources
import json
import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SubmitError, UnknownJob, Unreachable
from ..job import JobSpec
from ..store import own_wheel, snapshot
from ..target import Found, Listed
from . import request, s3
from .aws import Aws, Refused, split
from .entry import digest_of
from .options import KIND, SageMakerOptions
from .status import Native, describe

_ID = re.compile(r"[0-9a-z]{8,20}\Z")
progress = logging.getLogger("schedulers.progress")


def submit(aws: Aws, spec: JobSpec, options: SageMakerOptions, job_id: str, home: Path) -> Native:
    """Create the training job, once. Raises SubmitError, SpecError, ConfigError; Unreachable if it may exist."""
    account = aws.resolved()
    made = request.build(spec, options, job_id, account, aws.where.removeprefix("target "))
    request.check_limits(made, aws.where.removeprefix("target "))
    settings = request.settings(spec, options, job_id)
    stamped = request.stamped(made, settings)
    found = _earlier(aws, stamped)
    if found is None:
        try:
            _bring(aws, options, account, job_id, snapshot.pack(Path(spec.code), home).path, settings)
            aws.call("sagemaker", "create_training_job", **stamped)
        except Refused as error:
            if error.code != "ResourceInUse":
                raise SubmitError(str(error)) from None
        found = _earlier(aws, stamped)
    if found is None:
        raise Unreachable(f"{aws.where}: AWS has taken training job {stamped['TrainingJobName']}, and does not show it")
    return _native(aws, found, job_id)


def _native(aws: Aws, made: Mapping[str, Any], job_id: str) -> Native:
    created = int(made["CreationTime"].timestamp())
    return Native(region=aws.region, name=str(made["TrainingJobName"]), job_id=job_id, created_at=created)


def _bring(
    aws: Aws, options: SageMakerOptions, account: request.Account, job_id: str, tar: Path, settings: Mapping[str, Any]
) -> None:
    """Upload the files of the code channel to S3."""
    root, brought = request.root(options, account), request.brought(options, account, job_id)
    s3.check_bucket(aws, root, given=options.s3_output_path is not None)
    with tempfile.TemporaryDirectory() as directory:
        wheel = own_wheel.write(Path(directory))
        digests = {}
        for path, name in ((s3.packed(tar), request.CODE), (wheel, wheel.name)):
            digests[name] = digest_of(str(path))
            key = s3.put_content(aws, root, path, digests[name], _told)
            s3.copy(aws, root, key, brought + name)
    entry = importlib.resources.files(__package__).joinpath(request.ENTRY).read_bytes()
    s3.put(aws, brought + request.ENTRY, entry)
    text = json.dumps({**settings, "files": digests, "wheel": wheel.name}, indent=2)
    s3.put(aws, brought + request.SETTINGS, text.encode())


def _told(sent: int, size: int) -> None:
    progress.info("sending the code: %.0f of %.0f MB", sent / 1e6, size / 1e6)


def _earlier(aws: Aws, stamped: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the job if an earlier submit created it. Raises SubmitError if the name is another job's."""
    name = stamped["TrainingJobName"]
    made = describe(aws, str(name))
    if made is None:
        return None
    tags = aws.call("sagemaker", "list_tags", ResourceArn=made["TrainingJobArn"])["Tags"]
    if request.digest_of(tags) != request.digest_of(stamped["Tags"]):
        raise SubmitError(f"{aws.where}: there is a training job {name} already, and it is not this one; it stays")
    return made


def find(aws: Aws, job_id: str) -> Found | None:
    """Find a job that any machine submitted. Raises Unreachable, UnknownJob."""
    tail = re.sub(r"[^a-z0-9]+", "-", job_id)
    for each in aws.call("sagemaker", "list_training_jobs", NameContains=tail, MaxResults=10)["TrainingJobSummaries"]:
        made = aws.call("sagemaker", "describe_training_job", TrainingJobName=each["TrainingJobName"])
        tags = aws.call("sagemaker", "list_tags", ResourceArn=made["TrainingJobArn"])["Tags"]
        if {"Key": request.JOB_ID, "Value": job_id} in tags:
            return _found(aws, made, job_id)
    return None


def _found(aws: Aws, made: Mapping[str, Any], job_id: str) -> Found:
    channel = next((each for each in made["InputDataConfig"] if each["ChannelName"] == request.CHANNEL), None)
    if channel is None:
        raise UnknownJob(f"{aws.where}: training job {made['TrainingJobName']} has no channel {request.CHANNEL}")
    bucket, prefix = split(channel["DataSource"]["S3DataSource"]["S3Uri"])
    answer = aws.call("s3", "get_object", Bucket=bucket, Key=prefix + request.SETTINGS)
    with aws.asked("s3:GetObject"):
        text = answer["Body"].read()
    return Found.of(
        str(_native(aws, made, job_id)), lambda: json.loads(text)["spec"], target=aws.where.removeprefix("target "),
        kind=KIND, job_id=job_id, created_at=made["CreationTime"].timestamp(),
    )  # fmt: skip


def listed(aws: Aws) -> list[Listed]:
    """List all training jobs of accel in the region. Raises Unreachable."""
    jobs = []
    for each in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", MaxResults=100):
        head, _, job_id = str(each["TrainingJobName"]).rpartition("-")
        created = each["CreationTime"].timestamp()
        if not _ID.match(job_id):
            continue
        tags = aws.call("sagemaker", "list_tags", ResourceArn=each["TrainingJobArn"])["Tags"]
        made = describe(aws, each["TrainingJobName"])
        if made is not None and {"Key": request.JOB_ID, "Value": job_id} in tags:
            native, nodes = str(_native(aws, made, job_id)), int(made["ResourceConfig"].get("InstanceCount") or 1)
            jobs.append(Listed(job_id=job_id, native_id=native, name=head, nodes=nodes, created_at=created))
    return jobs
