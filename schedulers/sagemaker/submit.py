"""Submission of a job to SageMaker, files to S3 and then one call, and discovery of existing jobs."""

from __future__ import annotations

import importlib.resources
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, SubmitError, Unreachable
from ..job import FUNCTION_FILE, JobSpec
from ..store import atomic_files, own_wheel, snapshot
from ..store.store import created_at, full_id
from ..target import DiscoveredJob, JobSummary
from . import request, s3
from .aws import Aws, AwsError, split
from .entry import digest_of
from .options import KIND, SageMakerOptions
from .status import Native, describe, list_entries

_CLOCK_SKEW_S = 86_400.0


def submit(aws: Aws, spec: JobSpec, job_id: str, jobs: Path) -> Native:
    """Create the training job, once. Raises SubmitError, SpecError, ConfigError; Unreachable if it may exist.

    `submitting.json` in the job's directory marks that AWS may have the job; without it, AWS never had it.
    """
    options = aws.resolved_options()
    settings = request.settings(spec, options, job_id)
    tagged_request = request.with_digest(request.build(spec, options, job_id, aws.target), settings)
    name = str(tagged_request["TrainingJobName"])
    marker = f"{jobs}/{job_id}/submitting.json"
    if os.path.exists(marker) and (earlier := _earlier(aws, tagged_request)):
        return _native_of(aws, earlier, job_id)
    try:
        files = {request.CODE: snapshot.compress(snapshot.pack(Path(spec.code), jobs.parent).path)}
        if spec.calls_function:
            files[FUNCTION_FILE] = jobs / job_id / FUNCTION_FILE
        _upload(aws, options, job_id, files, settings)
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
    aws: Aws, options: SageMakerOptions, job_id: str, files: Mapping[str, Path], settings: Mapping[str, Any]
) -> None:
    """Upload the files of the code channel to S3."""
    root, destination = str(options.s3_output_path), request.input_uri(options, job_id)
    s3.check_bucket(aws, root)
    with tempfile.TemporaryDirectory() as directory:
        wheel = own_wheel.write(Path(directory))
        digests = {}
        for name, path in {**files, wheel.name: wheel}.items():
            digests[name] = digest_of(str(path))
            s3.upload(aws, root, path, digests[name], destination + name)
    entry = importlib.resources.files(__package__).joinpath(request.ENTRY).read_bytes()
    text = json.dumps({**settings, "files": digests, "wheel": wheel.name}, indent=2)
    bucket, prefix = split(destination)
    for name, data in ((request.ENTRY, entry), (request.SETTINGS, text.encode())):
        aws.call("s3", "put_object", Bucket=bucket, Key=prefix + name, Body=data)


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
    """Find a job that any machine submitted. Raises Unreachable, SchedulerError."""
    job = dict(_own_jobs(aws, NameContains=job_id)).get(job_id)
    if job is None:
        return None
    return DiscoveredJob.of(
        str(_native_of(aws, job, job_id)), lambda: _submitted_spec(aws, job), target=aws.target, kind=KIND,
        job_id=job_id, created_at=job["CreationTime"].timestamp(),
    )  # fmt: skip


def _submitted_spec(aws: Aws, job: Mapping[str, Any]) -> object:
    channels = {channel["ChannelName"]: channel["DataSource"] for channel in job["InputDataConfig"]}
    bucket, prefix = split(channels[request.CHANNEL]["S3DataSource"]["S3Uri"])
    reply = aws.call("s3", "get_object", Bucket=bucket, Key=prefix + request.SETTINGS)
    with aws.translated_errors("s3:GetObject"):
        return json.loads(reply["Body"].read())["spec"]


def list_jobs(aws: Aws) -> list[JobSummary]:
    """List all training jobs of accel in the region. Raises Unreachable."""
    return [
        JobSummary(
            job_id=job_id, native_id=str(_native_of(aws, job, job_id)), created_at=job["CreationTime"].timestamp(),
            name=job["TrainingJobName"].rpartition("-")[0],
            nodes=int(job["ResourceConfig"].get("InstanceCount") or 1),
        )
        for job_id, job in _own_jobs(aws)
    ]  # fmt: skip


def _own_jobs(aws: Aws, **parameters: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ids and descriptions of the training jobs that accel has created."""
    for summary in list_entries(aws, **parameters):
        job_id, created = summary["TrainingJobName"].rpartition("-")[2], summary["CreationTime"].timestamp()
        if full_id(job_id) != job_id or created_at(job_id) > created + _CLOCK_SKEW_S:  # no name of accel's
            continue
        tags = aws.call("sagemaker", "list_tags", ResourceArn=summary["TrainingJobArn"])["Tags"]
        job = describe(aws, summary["TrainingJobName"])
        if job is not None and {"Key": request.JOB_ID, "Value": job_id} in tags:
            yield job_id, job
