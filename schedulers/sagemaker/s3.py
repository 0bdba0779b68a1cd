"""S3: uploads of a job's files, the large ones by content so that none is sent twice, and downloads of artefacts."""

from __future__ import annotations

import contextlib
import gzip
import logging
import os
import shutil
import tarfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import NotReady, SchedulerError, SubmitError
from ..node.archive import extract
from ..store import atomic_files
from . import request
from .aws import Aws, AwsError, split
from .options import SageMakerOptions
from .status import Native, describe

# Uploads of a job's files.

_PART = 16 << 20
_THREADS = 4
_MISSING = ("404", "NoSuchKey")
_CONTENT_PREFIX = "accel/content"
_ORPHAN_S = 7 * 86_400.0
progress = logging.getLogger("schedulers.progress")


def pack_snapshot(tar: Path) -> Path:
    """Compress a snapshot next to itself, to the same bytes for the same snapshot. Raises StoreError."""
    path = tar.with_name(f"{tar.name}.gz")
    if path.exists():
        return path
    partial = f"{path}.{os.getpid()}"
    try:
        with (
            open(tar, "rb") as source,
            open(partial, "wb") as out,
            gzip.GzipFile(filename="", fileobj=out, mode="wb", mtime=0, compresslevel=6) as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
        os.replace(partial, path)
    except OSError as error:
        raise atomic_files.store_error(error, str(path), "write") from error
    return path


def put_content(aws: Aws, root: str, path: Path, digest: str) -> str:
    """Upload the file under its digest, and return its key. Resumes an interrupted upload."""
    bucket, prefix = split(root)
    key = "/".join(filter(None, (prefix, _CONTENT_PREFIX, digest)))
    size = path.stat().st_size
    # Without permission to list, S3 answers 403 for a missing object: the PUT shows whether writing is allowed.
    if _size_of(aws, bucket, key, (*_MISSING, "403")) == size:
        return key
    if size <= _PART:
        aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())
    else:
        _put_parts(aws, bucket, key, path, size)
    return key


def _size_of(aws: Aws, bucket: str, key: str, missing: Sequence[str]) -> int | None:
    """Return the size of an object, or None if S3 answers with an error code of `missing`."""
    try:
        return int(aws.call("s3", "head_object", Bucket=bucket, Key=key)["ContentLength"])
    except AwsError as error:
        if error.code in missing:
            return None
        raise


def _put_parts(aws: Aws, bucket: str, key: str, path: Path, size: int) -> None:
    upload, etags = _resumable_upload(aws, bucket, key, size)
    parameters = {"Bucket": bucket, "Key": key, "UploadId": upload}
    count = -(-size // _PART)
    sizes = [min(_PART, size - (number - 1) * _PART) for number in etags]

    def log_progress() -> None:
        progress.info("uploading the code: %.0f of %.0f MB", sum(sizes) / 1e6, size / 1e6)

    def put(number: int) -> None:
        with open(path, "rb") as file:
            file.seek((number - 1) * _PART)
            data = file.read(_PART)
        etags[number] = aws.call("s3", "upload_part", **parameters, PartNumber=number, Body=data)["ETag"]
        sizes.append(len(data))
        log_progress()

    log_progress()
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="upload") as pool:
        list(pool.map(put, [number for number in range(1, count + 1) if number not in etags]))
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    aws.call("s3", "complete_multipart_upload", **parameters, MultipartUpload={"Parts": parts})


def _resumable_upload(aws: Aws, bucket: str, key: str, size: int) -> tuple[str, dict[int, str]]:
    """Return an interrupted upload of this content and its parts, or a new upload."""
    for upload in aws.pages("s3", "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=key):
        if upload["Key"] == key:
            return str(upload["UploadId"]), _parts(aws, bucket, key, str(upload["UploadId"]), size)
    return str(aws.call("s3", "create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]), {}


def _parts(aws: Aws, bucket: str, key: str, upload: str, size: int) -> dict[int, str]:
    etags: dict[int, str] = {}
    for part in aws.pages("s3", "list_parts", "Parts", Bucket=bucket, Key=key, UploadId=upload):
        number = int(part["PartNumber"])
        if part["Size"] == min(_PART, size - (number - 1) * _PART):
            etags[number] = str(part["ETag"])
    return etags


def copy(aws: Aws, root: str, key: str, destination: str) -> None:
    """Copy an object within the bucket, without downloading it."""
    bucket, _ = split(root)
    client: Any = aws.client("s3")
    with aws.translated_errors("s3:CopyObject"):
        client.copy({"Bucket": bucket, "Key": key}, *split(destination))


def put(aws: Aws, uri: str, data: bytes) -> None:
    bucket, key = split(uri)
    aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=data)


def check_bucket(aws: Aws, root: str, explicit: bool) -> None:
    """Raise SubmitError if the bucket does not exist."""
    bucket, _ = split(root)
    try:
        aws.call("s3", "head_bucket", Bucket=bucket)
    except AwsError as error:
        if error.code in ("404", "NoSuchBucket"):
            command = f"aws s3 mb s3://{bucket}"
            origin = "s3_output_path" if explicit else "the account's default one for SageMaker"
            raise SubmitError(f"{aws.label}: bucket not found: {bucket} ({origin}); create it: {command}") from None
        raise SubmitError(str(error)) from None


def remove(aws: Aws, options: SageMakerOptions, job_ids: Sequence[str]) -> list[str]:
    """Delete the files that these jobs' containers read, and code uploads interrupted more than a week ago.

    Returns a line for each job whose files could not be deleted.
    """
    lines: list[str] = []
    account = aws.resolve_account()
    bucket, prefix = split(request.root(options, account))
    for job_id in job_ids:
        _, job_prefix = split(request.input_uri(options, account, job_id))
        try:
            for entry in aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=job_prefix):
                aws.call("s3", "delete_object", Bucket=bucket, Key=entry["Key"])
        except SchedulerError as error:
            lines.append(f"job {job_id}: {error}")
    upload_prefix = "/".join(filter(None, (prefix, _CONTENT_PREFIX)))
    with contextlib.suppress(AwsError):
        for entry in aws.pages("s3", "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=upload_prefix):
            if time.time() - entry["Initiated"].timestamp() > _ORPHAN_S:
                parameters = {"Bucket": bucket, "Key": entry["Key"], "UploadId": entry["UploadId"]}
                aws.call("s3", "abort_multipart_upload", **parameters)
    return lines


# Downloads of a job's artefacts, complete or not at all.

_ARTEFACTS = ("model", "output")
_FINAL = ("Completed", "Failed", "Stopped")


def fetch_artefacts(aws: Aws, native: Native, directory: Path) -> list[str]:
    """Download the artefacts that exist to `directory/model` and `directory/output`. Return their names.

    Raises NotReady if the job runs, left nothing, or `directory` exists; SchedulerError for a damaged archive.
    """
    if os.path.lexists(directory):
        raise NotReady(f"{directory} exists already: choose another (--output), or remove it")
    job = describe(aws, native.name)
    if job is None:
        raise NotReady(f"job {native.job_id}: AWS has no such training job")
    if job["TrainingJobStatus"] not in _FINAL:
        raise NotReady(f"job {native.job_id} still runs ({job['SecondaryStatus']}): its artefacts follow at its end")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    names = []
    try:
        for name in _ARTEFACTS:
            if _fetch_one(aws, _uri(job, name), partial, name):
                names.append(name)
        if not names:
            raise NotReady(f"job {native.job_id} left nothing in SM_MODEL_DIR and SM_OUTPUT_DATA_DIR")
        os.rename(partial, directory)
    except OSError as error:
        raise SchedulerError(f"cannot write {directory}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return names


def _uri(job: Mapping[str, Any], name: str) -> str:
    """Return the URI of an artefact's archive, or if it is not compressed, the key prefix of its files."""
    root = str(job["OutputDataConfig"]["S3OutputPath"]).rstrip("/")
    uncompressed = job["OutputDataConfig"].get("CompressionType") == "NONE"
    return f"{root}/{job['TrainingJobName']}/output/{name}{'/' if uncompressed else '.tar.gz'}"


def _fetch_one(aws: Aws, uri: str, partial: Path, name: str) -> bool:
    if uri.endswith("/"):
        return _files(aws, uri, partial / name)
    bucket, key = split(uri)
    size = _size_of(aws, bucket, key, _MISSING)
    if size is None:
        return False
    os.makedirs(partial / name)
    archive = partial / f"{name}.tar.gz"
    _download(aws, bucket, key, archive, size)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            extract(tar, str(partial / name))
    except (tarfile.TarError, EOFError, OSError) as error:
        raise SchedulerError(f"{uri} cannot be unpacked: {error}") from None
    os.unlink(archive)
    return True


def _files(aws: Aws, uri: str, directory: Path) -> bool:
    bucket, prefix = split(uri)
    has_files = False
    for s3_object in aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix):
        key = str(s3_object["Key"])
        relative_path = os.path.normpath(key[len(prefix) :])
        if relative_path.startswith(("..", "/")) or key.endswith("/"):
            continue
        path = directory / relative_path
        os.makedirs(path.parent, exist_ok=True)
        _download(aws, bucket, key, path, int(s3_object["Size"]))
        has_files = True
    return has_files


def _download(aws: Aws, bucket: str, key: str, path: Path, size: int) -> None:
    """Download a file. boto3 verifies the checksum if S3 has one. Raises SchedulerError for a wrong length."""
    client = aws.client("s3")
    with aws.translated_errors("s3:GetObject"):
        client.download_file(bucket, key, str(path))
    if path.stat().st_size != size:
        raise SchedulerError(f"s3://{bucket}/{key} {path.stat().st_size} bytes downloaded of {size}")
