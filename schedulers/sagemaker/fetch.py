"""Download of a job's artefacts from S3 to a directory, all or nothing."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import NotReady, SchedulerError
from .aws import Aws, Refused, split
from .native_id import Native
from .status import describe

_ARTEFACTS = ("model", "output")
_FINAL = ("Completed", "Failed", "Stopped")


def fetch(aws: Aws, native: Native, directory: Path) -> list[str]:
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
