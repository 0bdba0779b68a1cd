"""Upload what a job's containers read, large files by content so that none is sent twice; fetch its artefacts."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..errors import NotReady, SchedulerError, SubmitError
from ..store import atomic_files
from . import request
from .aws import Aws, Refused, split
from .options import SageMakerOptions
from .status import Native, describe

# Upload.

_PART = 16 << 20
_THREADS = 4
_KEPT = "accel/content"
_ORPHAN_S = 7 * 86_400.0


def packed(tar: Path) -> Path:
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
        raise atomic_files.refusal(error, str(path), "write") from error
    return path


def put_content(aws: Aws, root: str, path: Path, digest: str, told: Callable[[int, int], None]) -> str:
    """Upload the file under its digest, and return its key. Resumes an interrupted upload.

    `told` is called with the number of bytes uploaded so far and the total.
    """
    bucket, prefix = split(root)
    key = "/".join(filter(None, (prefix, _KEPT, digest)))
    size = path.stat().st_size
    if _there(aws, bucket, key, size):
        return key
    if size <= _PART:
        aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())
        return key
    _put_parts(aws, bucket, key, path, size, told)
    return key


def _there(aws: Aws, bucket: str, key: str, size: int) -> bool:
    try:
        return bool(aws.call("s3", "head_object", Bucket=bucket, Key=key)["ContentLength"] == size)
    except Refused as error:
        # Who may write and not list is told 403 of what is not there: the PUT says whether that was all.
        if error.code in ("404", "403", "NoSuchKey"):
            return False
        raise


def _put_parts(aws: Aws, bucket: str, key: str, path: Path, size: int, told: Callable[[int, int], None]) -> None:
    upload, etags = _begun(aws, bucket, key, size)
    where = {"Bucket": bucket, "Key": key, "UploadId": upload}
    count = -(-size // _PART)
    sent = [min(_PART, size - (number - 1) * _PART) for number in etags]
    told(sum(sent), size)

    def put(number: int) -> None:
        with open(path, "rb") as file:
            file.seek((number - 1) * _PART)
            data = file.read(_PART)
        etags[number] = aws.call("s3", "upload_part", **where, PartNumber=number, Body=data)["ETag"]
        sent.append(len(data))
        told(sum(sent), size)

    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="upload") as pool:
        list(pool.map(put, [number for number in range(1, count + 1) if number not in etags]))
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
    aws.call("s3", "complete_multipart_upload", **where, MultipartUpload={"Parts": parts})


def _begun(aws: Aws, bucket: str, key: str, size: int) -> tuple[str, dict[int, str]]:
    """Return an interrupted upload of this content and its parts, or a new upload."""
    for upload in aws.pages("s3", "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=key):
        if upload["Key"] == key:
            return str(upload["UploadId"]), _parts(aws, bucket, key, str(upload["UploadId"]), size)
    return str(aws.call("s3", "create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]), {}


def _parts(aws: Aws, bucket: str, key: str, upload: str, size: int) -> dict[int, str]:
    found: dict[int, str] = {}
    for part in aws.pages("s3", "list_parts", "Parts", Bucket=bucket, Key=key, UploadId=upload):
        number = int(part["PartNumber"])
        if part["Size"] == min(_PART, size - (number - 1) * _PART):
            found[number] = str(part["ETag"])
    return found


def copy(aws: Aws, root: str, key: str, to: str) -> None:
    """Copy an object within the bucket, without downloading it."""
    bucket, _ = split(root)
    client: Any = aws.client("s3")
    with aws.asked("s3:CopyObject"):
        client.copy({"Bucket": bucket, "Key": key}, *split(to))


def put(aws: Aws, uri: str, data: bytes) -> None:
    bucket, key = split(uri)
    aws.call("s3", "put_object", Bucket=bucket, Key=key, Body=data)


def check_bucket(aws: Aws, root: str, given: bool) -> None:
    """Raise SubmitError if the bucket does not exist."""
    bucket, _ = split(root)
    try:
        aws.call("s3", "head_bucket", Bucket=bucket)
    except Refused as error:
        if error.code in ("404", "NoSuchBucket"):
            make = f"aws s3 mb s3://{bucket}"
            why = "s3_output_path" if given else "the account's default one for SageMaker"
            raise SubmitError(f"{aws.where}: there is no bucket {bucket} ({why}); make it: {make}") from None
        raise SubmitError(str(error)) from None


def remove(aws: Aws, options: SageMakerOptions, job_ids: Sequence[str]) -> list[str]:
    """Delete the files that these jobs' containers read, and code uploads interrupted more than a week ago.

    Returns a line for each job whose files could not be deleted.
    """
    lines: list[str] = []
    account = aws.resolved()
    bucket, prefix = split(request.root(options, account))
    for job_id in job_ids:
        _, mine = split(request.brought(options, account, job_id))
        try:
            for each in aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=mine):
                aws.call("s3", "delete_object", Bucket=bucket, Key=each["Key"])
        except SchedulerError as error:
            lines.append(f"job {job_id}: {error}")
    kept = "/".join(filter(None, (prefix, _KEPT)))
    with contextlib.suppress(Refused):
        for each in aws.pages("s3", "list_multipart_uploads", "Uploads", Bucket=bucket, Prefix=kept):
            if time.time() - each["Initiated"].timestamp() > _ORPHAN_S:
                asked = {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
                aws.call("s3", "abort_multipart_upload", **asked)
    return lines


# Fetch: whole, or not at all.

_ARTEFACTS = ("model", "output")
_FINAL = ("Completed", "Failed", "Stopped")


def fetch_artefacts(aws: Aws, native: Native, directory: Path) -> list[str]:
    """Download the artefacts that exist to `directory/model` and `directory/output`. Return their names.

    Raises NotReady if the job runs, left nothing, or `directory` exists; SchedulerError for a damaged archive.
    """
    if os.path.lexists(directory):
        raise NotReady(f"{directory} is there already: name another one (--output), or remove it")
    made = describe(aws, native.name)
    if made is None:
        raise NotReady(f"job {native.job_id}: AWS has no such training job")
    if made["TrainingJobStatus"] not in _FINAL:
        raise NotReady(f"job {native.job_id} still runs ({made['SecondaryStatus']}): its artefacts come at its end")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}")
    found = []
    try:
        for name in _ARTEFACTS:
            if _one(aws, _uri(made, name), partial, name):
                found.append(name)
        if not found:
            raise NotReady(f"job {native.job_id} left nothing in SM_MODEL_DIR and SM_OUTPUT_DATA_DIR")
        os.rename(partial, directory)
    except OSError as error:
        raise SchedulerError(f"cannot write {directory}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return found


def _uri(made: Mapping[str, Any], name: str) -> str:
    """Return the URI of an artefact's archive, or if it is not compressed, the key prefix of its files."""
    root = str(made["OutputDataConfig"]["S3OutputPath"]).rstrip("/")
    plain = made["OutputDataConfig"].get("CompressionType") == "NONE"
    return f"{root}/{made['TrainingJobName']}/output/{name}{'/' if plain else '.tar.gz'}"


def _one(aws: Aws, uri: str, partial: Path, name: str) -> bool:
    if uri.endswith("/"):
        return _files(aws, uri, partial / name)
    bucket, key = split(uri)
    try:
        head = aws.call("s3", "head_object", Bucket=bucket, Key=key)
    except Refused as error:
        if error.code in ("404", "NoSuchKey"):
            return False
        raise
    os.makedirs(partial / name)
    archive = partial / f"{name}.tar.gz"
    _download(aws, bucket, key, archive, int(head["ContentLength"]))
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(partial / name, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise SchedulerError(f"{uri} cannot be unpacked: {error}") from None
    os.unlink(archive)
    return True


def _files(aws: Aws, uri: str, directory: Path) -> bool:
    bucket, prefix = split(uri)
    found = False
    for each in aws.pages("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix):
        key = str(each["Key"])
        inside = os.path.normpath(key[len(prefix) :])
        if inside.startswith(("..", "/")) or key.endswith("/"):
            continue
        path = directory / inside
        os.makedirs(path.parent, exist_ok=True)
        _download(aws, bucket, key, path, int(each["Size"]))
        found = True
    return found


def _download(aws: Aws, bucket: str, key: str, path: Path, size: int) -> None:
    """Download a file. boto3 verifies the checksum if S3 has one. Raises SchedulerError for a wrong length."""
    client = aws.client("s3")
    with aws.asked("s3:GetObject"):
        client.download_file(bucket, key, str(path))
    if path.stat().st_size != size:
        raise SchedulerError(f"s3://{bucket}/{key} came with {path.stat().st_size} bytes, and has {size}")
