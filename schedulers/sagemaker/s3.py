"""S3: uploads of a job's files, the large ones by content so that none is sent twice, and downloads of artefacts."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import NotReady, SchedulerError, SubmitError
from ..node.archive import extract
from ..store import object_store
from . import request
from .aws import Aws, AwsError, split
from .status import Native, describe

# Uploads of a job's files.

_CONTENT = "accel/content"
_ORPHAN_S = 7 * 86_400.0


def upload(aws: Aws, root: str, path: Path, digest: str, destination: str) -> None:
    """Upload the file once for its content, and have S3 copy it to the URI `destination` in the same bucket."""
    bucket, key = split(f"{root}/{_CONTENT}/{digest}")
    client = aws.client("s3", transfers=True)
    with (
        aws.translated_errors("s3:PutObject"),
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        object_store.put_content(client, bucket, key, data)
        client.copy({"Bucket": bucket, "Key": key}, *split(destination))


def check_bucket(aws: Aws, root: str) -> None:
    """Raise SubmitError if the bucket does not exist. Raises AwsError, Unreachable."""
    bucket, _ = split(root)
    try:
        aws.call("s3", "head_bucket", Bucket=bucket)
    except AwsError as error:
        if error.code not in ("404", "NoSuchBucket"):
            raise
        command = f"aws s3 mb s3://{bucket}"
        origin = "s3_output_path" if aws.options.s3_output_path else "the account's default one for SageMaker"
        raise SubmitError(f"{aws.label}: bucket not found: {bucket} ({origin}); create it: {command}") from None


def remove(aws: Aws, job_ids: Sequence[str]) -> list[str]:
    """Delete the files that these jobs' containers read, and code uploads interrupted more than a week ago.

    Returns a line for each job whose files could not be deleted.
    """
    lines: list[str] = []
    options = aws.resolved_options()
    for job_id in job_ids:
        bucket, prefix = split(request.input_uri(options, job_id))
        try:
            for entry in aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix):
                aws.call("s3", "delete_object", Bucket=bucket, Key=entry["Key"])
        except SchedulerError as error:
            lines.append(f"job {job_id}: {error}")
    bucket, prefix = split(f"{options.s3_output_path}/{_CONTENT}")
    with contextlib.suppress(AwsError):
        for entry in aws.pages("s3", "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=prefix):
            if time.time() - entry["Initiated"].timestamp() > _ORPHAN_S:
                parameters = {"Bucket": bucket, "Key": entry["Key"], "UploadId": entry["UploadId"]}
                aws.call("s3", "abort_multipart_upload", **parameters)
    return lines


# Downloads of a job's artefacts, complete or not at all.

_ARTEFACTS = ("model", "output")


def fetch_artefacts(aws: Aws, native: Native, directory: Path) -> list[str]:
    """Download the artefacts that exist to `directory/model` and `directory/output`. Return their names.

    Raises NotReady if the job runs, left nothing, or `directory` exists; SchedulerError for a damaged archive.
    """
    if os.path.lexists(directory):
        raise NotReady(f"{directory} exists already: choose another (--output), or remove it")
    job = describe(aws, native.name)
    if job is None:
        raise NotReady(f"job {native.job_id}: AWS has no such training job")
    if job["TrainingJobStatus"] in ("InProgress", "Stopping"):
        raise NotReady(f"job {native.job_id} still runs ({job['SecondaryStatus']}): its artefacts follow at its end")
    uri = f"{job['OutputDataConfig']['S3OutputPath'].rstrip('/')}/{native.name}/output/"
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        _download(aws, uri, partial)
        names = [name for name in _ARTEFACTS if (partial / name).exists()]
        if not names:
            raise NotReady(f"job {native.job_id} left nothing in SM_MODEL_DIR and SM_OUTPUT_DATA_DIR")
        os.rename(partial, directory)
    except OSError as error:
        raise SchedulerError(f"cannot write {directory}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return names


def _download(aws: Aws, uri: str, directory: Path) -> None:
    """Download all artefacts: archives or, of a job with output_compression_type NONE, single files.

    boto3 verifies a file's checksum if S3 has one. Raises SchedulerError for a wrong length.
    """
    client, (bucket, prefix) = aws.client("s3", transfers=True), split(uri)
    for entry in aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix):
        key = str(entry["Key"])
        path = os.path.normpath(key[len(prefix) :])
        name = path.partition("/")[0]
        if key.endswith("/") or name.removesuffix(".tar.gz") not in _ARTEFACTS:
            continue
        file = directory / path
        os.makedirs(file.parent, exist_ok=True)
        with aws.translated_errors("s3:GetObject"):
            client.download_file(bucket, key, str(file))
        if file.stat().st_size != entry["Size"]:
            raise SchedulerError(f"s3://{bucket}/{key} {file.stat().st_size} bytes downloaded of {entry['Size']}")
        if path == name and name not in _ARTEFACTS:
            _unpack(file, f"s3://{bucket}/{key}")


def _unpack(archive: Path, uri: str) -> None:
    directory = str(archive).removesuffix(".tar.gz")
    os.makedirs(directory)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            extract(tar, directory)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise SchedulerError(f"{uri} cannot be unpacked: {error}") from None
    os.unlink(archive)
