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
from ..target import DiscoveredJob, JobSummary
from . import request, s3
from .aws import Aws, AwsError, split
from .entry import digest_of
from .options import KIND, SageMakerOptions
from .status import Native, describe

_ID = re.compile(r"[0-9a-z]{8,20}\Z")
progress = logging.getLogger("schedulers.progress")


def submit(aws: Aws, spec: JobSpec, options: SageMakerOptions, job_id: str, home: Path) -> Native:
    """Create the training job, once. Raises SubmitError, SpecError, ConfigError; Unreachable if it may exist."""
    account = aws.resolve_account()
    job_request = request.build(spec, options, job_id, account, aws.label.removeprefix("target "))
    request.check_limits(job_request, aws.label.removeprefix("target "))
    settings = request.settings(spec, options, job_id)
    tagged_request = request.with_digest(job_request, settings)
    job = _earlier(aws, tagged_request)
    if job is None:
        try:
            _upload(aws, options, account, job_id, snapshot.pack(Path(spec.code), home).path, settings)
            aws.call("sagemaker", "create_training_job", **tagged_request)
        except AwsError as error:
            if error.code != "ResourceInUse":
                raise SubmitError(str(error)) from None
        job = _earlier(aws, tagged_request)
    if job is None:
        raise Unreachable(
            f"{aws.label}: AWS accepted training job {tagged_request['TrainingJobName']}, but does not show it"
        )
    return _native_of(aws, job, job_id)


def _native_of(aws: Aws, job: Mapping[str, Any], job_id: str) -> Native:
    created = int(job["CreationTime"].timestamp())
    return Native(region=aws.region, name=str(job["TrainingJobName"]), job_id=job_id, created_at=created)


def _upload(
    aws: Aws, options: SageMakerOptions, account: request.Account, job_id: str, tar: Path, settings: Mapping[str, Any]
) -> None:
    """Upload the files of the code channel to S3."""
    root, destination = request.root(options, account), request.input_uri(options, account, job_id)
    s3.check_bucket(aws, root, explicit=options.s3_output_path is not None)
    with tempfile.TemporaryDirectory() as directory:
        wheel = own_wheel.write(Path(directory))
        digests = {}
        for path, name in ((s3.pack_snapshot(tar), request.CODE), (wheel, wheel.name)):
            digests[name] = digest_of(str(path))
            key = s3.put_content(aws, root, path, digests[name], _log_progress)
            s3.copy(aws, root, key, destination + name)
    entry = importlib.resources.files(__package__).joinpath(request.ENTRY).read_bytes()
    s3.put(aws, destination + request.ENTRY, entry)
    text = json.dumps({**settings, "files": digests, "wheel": wheel.name}, indent=2)
    s3.put(aws, destination + request.SETTINGS, text.encode())


def _log_progress(sent: int, size: int) -> None:
    progress.info("uploading the code: %.0f of %.0f MB", sent / 1e6, size / 1e6)


def _earlier(aws: Aws, tagged_request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the job if an earlier submit created it. Raises SubmitError if the name is another job's."""
    name = tagged_request["TrainingJobName"]
    job = describe(aws, str(name))
    if job is None:
        return None
    tags = aws.call("sagemaker", "list_tags", ResourceArn=job["TrainingJobArn"])["Tags"]
    if request.digest_of(tags) != request.digest_of(tagged_request["Tags"]):
        raise SubmitError(f"{aws.label}: training job {name} exists already, and is another job; it stays")
    return job


def find(aws: Aws, job_id: str) -> DiscoveredJob | None:
    """Find a job that any machine submitted. Raises Unreachable, UnknownJob."""
    tail = re.sub(r"[^a-z0-9]+", "-", job_id)
    for summary in aws.call("sagemaker", "list_training_jobs", NameContains=tail, MaxResults=10)[
        "TrainingJobSummaries"
    ]:
        job = aws.call("sagemaker", "describe_training_job", TrainingJobName=summary["TrainingJobName"])
        tags = aws.call("sagemaker", "list_tags", ResourceArn=job["TrainingJobArn"])["Tags"]
        if {"Key": request.JOB_ID, "Value": job_id} in tags:
            return _discovered_job(aws, job, job_id)
    return None


def _discovered_job(aws: Aws, job: Mapping[str, Any], job_id: str) -> DiscoveredJob:
    channel = next(
        (candidate for candidate in job["InputDataConfig"] if candidate["ChannelName"] == request.CHANNEL), None
    )
    if channel is None:
        raise UnknownJob(f"{aws.label}: training job {job['TrainingJobName']} has no channel {request.CHANNEL}")
    bucket, prefix = split(channel["DataSource"]["S3DataSource"]["S3Uri"])
    reply = aws.call("s3", "get_object", Bucket=bucket, Key=prefix + request.SETTINGS)
    with aws.translated_errors("s3:GetObject"):
        text = reply["Body"].read()
    return DiscoveredJob.of(
        str(_native_of(aws, job, job_id)), lambda: json.loads(text)["spec"], target=aws.label.removeprefix("target "),
        kind=KIND, job_id=job_id, created_at=job["CreationTime"].timestamp(),
    )  # fmt: skip


def list_jobs(aws: Aws) -> list[JobSummary]:
    """List all training jobs of accel in the region. Raises Unreachable."""
    jobs = []
    for summary in aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", MaxResults=100):
        head, _, job_id = str(summary["TrainingJobName"]).rpartition("-")
        created = summary["CreationTime"].timestamp()
        if not _ID.match(job_id):
            continue
        tags = aws.call("sagemaker", "list_tags", ResourceArn=summary["TrainingJobArn"])["Tags"]
        job = describe(aws, summary["TrainingJobName"])
        if job is not None and {"Key": request.JOB_ID, "Value": job_id} in tags:
            native, nodes = str(_native_of(aws, job, job_id)), int(job["ResourceConfig"].get("InstanceCount") or 1)
            jobs.append(JobSummary(job_id=job_id, native_id=native, name=head, nodes=nodes, created_at=created))
    return jobs
