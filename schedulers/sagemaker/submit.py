"""Submission of a job to SageMaker, files to S3 and then one call, and discovery of existing jobs."""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SubmitError, UnknownJob, Unreachable
from ..job import FUNCTION_FILE, JobSpec
from ..store import atomic_files, own_wheel, snapshot
from ..store.store import created_at, full_id
from ..target import DiscoveredJob, JobSummary
from . import request, s3
from .aws import Aws, AwsError, split
from .entry import digest_of
from .options import KIND, SageMakerOptions
from .status import Native, describe

_CLOCK_SKEW_S = 86_400.0


def submit(aws: Aws, spec: JobSpec, options: SageMakerOptions, job_id: str, jobs: Path) -> Native:
    """Create the training job, once. Raises SubmitError, SpecError, ConfigError; Unreachable if it may exist.

    `submitting.json` in the job's directory marks that AWS may have the job; without it, AWS never had it.
    """
    account = aws.resolve_account()
    settings = request.settings(spec, options, job_id)
    tagged_request = request.with_digest(request.build(spec, options, job_id, account, aws.target), settings)
    name = str(tagged_request["TrainingJobName"])
    marker = f"{jobs}/{job_id}/submitting.json"
    if os.path.exists(marker) and (earlier := _earlier(aws, tagged_request)):
        return _native_of(aws, earlier, job_id)
    try:
        files = {request.CODE: s3.pack_snapshot(snapshot.pack(Path(spec.code), jobs.parent).path)}
        if spec.calls_function:
            files[FUNCTION_FILE] = jobs / job_id / FUNCTION_FILE
        _upload(aws, options, account, job_id, files, settings)
        atomic_files.write_document(marker, {})
        sent_at = time.time()
        aws.call("sagemaker", "create_training_job", **tagged_request)
    except AwsError as error:
        if error.code != "ResourceInUse":
            raise SubmitError(str(error)) from None
        if earlier := _earlier(aws, tagged_request):
            return _native_of(aws, earlier, job_id)
        raise Unreachable(f"{aws.label}: AWS has training job {name}, but does not show it") from None
    # AWS has the job: no other question may fail the submit now.
    return Native(region=aws.region, name=name, job_id=job_id, created_at=int(sent_at))


def _native_of(aws: Aws, job: Mapping[str, Any], job_id: str) -> Native:
    created = int(job["CreationTime"].timestamp())
    return Native(region=aws.region, name=str(job["TrainingJobName"]), job_id=job_id, created_at=created)


def _upload(
    aws: Aws,
    options: SageMakerOptions,
    account: request.Account,
    job_id: str,
    files: Mapping[str, Path],
    settings: Mapping[str, Any],
) -> None:
    """Upload the files of the code channel to S3."""
    root, destination = request.root(options, account), request.input_uri(options, account, job_id)
    s3.check_bucket(aws, root, explicit=options.s3_output_path is not None)
    with tempfile.TemporaryDirectory() as directory:
        wheel = own_wheel.write(Path(directory))
        digests = {}
        for name, path in {**files, wheel.name: wheel}.items():
            digests[name] = digest_of(str(path))
            key = s3.put_content(aws, root, path, digests[name])
            s3.copy(aws, root, key, destination + name)
    entry = importlib.resources.files(__package__).joinpath(request.ENTRY).read_bytes()
    s3.put(aws, destination + request.ENTRY, entry)
    text = json.dumps({**settings, "files": digests, "wheel": wheel.name}, indent=2)
    s3.put(aws, destination + request.SETTINGS, text.encode())


def _earlier(aws: Aws, tagged_request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the job if an earlier submit created it. Raises SubmitError if the name is another job's, Unreachable."""
    name = tagged_request["TrainingJobName"]
    try:
        job = describe(aws, str(name))
        if job is None:
            return None
        tags = aws.call("sagemaker", "list_tags", ResourceArn=job["TrainingJobArn"])["Tags"]
    except (AwsError, ConfigError) as error:
        raise Unreachable(f"cannot check whether AWS has the job from an earlier submit: {error}") from None
    if request.digest_of(tags) != request.digest_of(tagged_request["Tags"]):
        raise SubmitError(f"{aws.label}: training job {name} exists already, and is another job; it stays")
    return job


def find(aws: Aws, job_id: str) -> DiscoveredJob | None:
    """Find a job that any machine submitted. Raises Unreachable, UnknownJob."""
    tail = re.sub(r"[^a-z0-9]+", "-", job_id)
    for summary in _summaries(aws, NameContains=tail):
        job = aws.call("sagemaker", "describe_training_job", TrainingJobName=summary["TrainingJobName"])
        tags = aws.call("sagemaker", "list_tags", ResourceArn=job["TrainingJobArn"])["Tags"]
        if {"Key": request.JOB_ID, "Value": job_id} in tags:
            return _discovered_job(aws, job, job_id)
    return None


def _discovered_job(aws: Aws, job: Mapping[str, Any], job_id: str) -> DiscoveredJob:
    channels = {channel["ChannelName"]: channel for channel in job["InputDataConfig"]}
    if request.CHANNEL not in channels:
        raise UnknownJob(f"{aws.label}: training job {job['TrainingJobName']} has no channel {request.CHANNEL}")
    bucket, prefix = split(channels[request.CHANNEL]["DataSource"]["S3DataSource"]["S3Uri"])
    reply = aws.call("s3", "get_object", Bucket=bucket, Key=prefix + request.SETTINGS)
    with aws.translated_errors("s3:GetObject"):
        text = reply["Body"].read()
    return DiscoveredJob.of(
        str(_native_of(aws, job, job_id)), lambda: json.loads(text)["spec"], target=aws.target,
        kind=KIND, job_id=job_id, created_at=job["CreationTime"].timestamp(),
    )  # fmt: skip


def _summaries(aws: Aws, **parameters: Any) -> Iterator[dict[str, Any]]:
    return aws.pages("sagemaker", "list_training_jobs", "TrainingJobSummaries", MaxResults=100, **parameters)


def list_jobs(aws: Aws) -> list[JobSummary]:
    """List all training jobs of accel in the region. Raises Unreachable."""
    jobs = []
    for summary in _summaries(aws):
        head, _, job_id = str(summary["TrainingJobName"]).rpartition("-")
        created = summary["CreationTime"].timestamp()
        if full_id(job_id) != job_id or created_at(job_id) > created + _CLOCK_SKEW_S:  # no name of accel's
            continue
        tags = aws.call("sagemaker", "list_tags", ResourceArn=summary["TrainingJobArn"])["Tags"]
        job = describe(aws, summary["TrainingJobName"])
        if job is not None and {"Key": request.JOB_ID, "Value": job_id} in tags:
            native, nodes = str(_native_of(aws, job, job_id)), int(job["ResourceConfig"].get("InstanceCount") or 1)
            jobs.append(JobSummary(job_id=job_id, native_id=native, name=head, nodes=nodes, created_at=created))
    return jobs


def running(aws: Aws, jobs: Iterable[str]) -> dict[str, str]:
    """Return the status of each of these jobs that AWS still runs. Raises Unreachable, AwsError."""
    statuses = {}
    for status in ("InProgress", "Stopping"):
        for summary in _summaries(aws, StatusEquals=status):
            statuses[str(summary["TrainingJobName"]).rpartition("-")[2]] = f"{status} at AWS"
    return {job_id: statuses[job_id] for job_id in jobs if job_id in statuses}
