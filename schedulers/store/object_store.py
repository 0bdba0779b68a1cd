"""Objects that are named by their content, in S3 or a store with its API: each is uploaded once, large ones in parts.

The functions take a client of boto3's, and raise botocore's errors.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MISSING = ("404", "NoSuchKey", "NotFound")
_DENIED = ("403", "AccessDenied", "AccessDeniedException")
_PART = 16 << 20
_THREADS = 4
progress = logging.getLogger("schedulers.progress")


def put_content(client: Any, bucket: str, key: str, data: bytes | mmap.mmap) -> None:
    """Upload the object unless it exists. No part is sent again that an interrupted upload has sent."""
    # Without permission to list, S3 answers 403 for a missing object: the PUT shows whether writing is allowed.
    if size_of(client, bucket, key, (*MISSING, *_DENIED)) == len(data):
        return
    if len(data) <= _PART:
        client.put_object(Bucket=bucket, Key=key, Body=data[:])
    else:
        _put_parts(client, bucket, key, data)


def size_of(client: Any, bucket: str, key: str, missing: Container[str] = MISSING) -> int | None:
    """Return the size of an object, or None if the store answers with an error code of `missing`."""
    from botocore.exceptions import ClientError

    try:
        return int(client.head_object(Bucket=bucket, Key=key)["ContentLength"])
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in missing:
            return None
        raise


def _put_parts(client: Any, bucket: str, key: str, data: bytes | mmap.mmap) -> None:
    upload_id, etags = _resumable_upload(client, bucket, key, len(data))
    upload = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    numbers = range(1, -(-len(data) // _PART) + 1)
    sent_bytes = [_part_size(number, len(data)) for number in etags]

    def log_progress() -> None:
        progress.info("uploading the code: %.0f of %.0f MB", sum(sent_bytes) / 1e6, len(data) / 1e6)

    def put(number: int) -> None:
        part = data[(number - 1) * _PART : number * _PART]
        etags[number] = client.upload_part(**upload, PartNumber=number, Body=part)["ETag"]
        sent_bytes.append(len(part))
        log_progress()

    log_progress()
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="upload") as pool:
        list(pool.map(put, [number for number in numbers if number not in etags]))
    parts = [{"PartNumber": number, "ETag": etags[number]} for number in numbers]
    client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})


def _part_size(number: int, size: int) -> int:
    return min(_PART, size - (number - 1) * _PART)


def _resumable_upload(client: Any, bucket: str, key: str, size: int) -> tuple[str, dict[int, str]]:
    """Return an interrupted upload of this content and the tags of its parts, or a new upload."""
    from botocore.exceptions import ClientError

    try:
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=key):
            for upload in page.get("Uploads", ()):
                if upload["Key"] == key:
                    return upload["UploadId"], _parts(client, bucket, key, upload["UploadId"], size)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") not in (*_DENIED, "NotImplemented"):
            raise
    return client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"], {}


def _parts(client: Any, bucket: str, key: str, upload_id: str, size: int) -> dict[int, str]:
    etags: dict[int, str] = {}
    for page in client.get_paginator("list_parts").paginate(Bucket=bucket, Key=key, UploadId=upload_id):
        for part in page.get("Parts", ()):
            number = int(part["PartNumber"])
            if part["Size"] == _part_size(number, size):
                etags[number] = part["ETag"]
    return etags
