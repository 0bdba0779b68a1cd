"""Code in an object store with the S3 API, named by its digest so that nothing is uploaded twice."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from ...errors import SubmitError
from ..manifests.code_delivery import Code
from ..options import ObjectStore

_MISSING = ("404", "NoSuchKey", "NotFound")


def put(store: ObjectStore, code: Code, data: bytes, target: str) -> None:
    """Upload the code with our credentials, unless it is there. Raises SubmitError: nothing was created yet."""
    where = f"target {target}: code_store {store.url}"
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise SubmitError(f"{where}: the package boto3 is not installed: pip install 'accel-launch[s3]'") from None
    parts = urlsplit(store.url)
    key = "/".join([*(word for word in parts.path.split("/") if word), code.file])
    config = Config(retries={"mode": "standard", "max_attempts": 3}, connect_timeout=10, read_timeout=60)
    try:
        # Not the package's own session, which keeps what it found of credentials for ever.
        client = boto3.Session().client("s3", endpoint_url=store.endpoint, region_name=store.region, config=config)
        if not _there(client, parts.netloc, key, len(data)):
            client.put_object(Bucket=parts.netloc, Key=key, Body=data, ContentType="application/gzip")
    except ClientError as error:
        said = error.response.get("Error", {})
        raise SubmitError(f"{where}: {said.get('Code')}: {said.get('Message') or error}") from None
    except (BotoCoreError, ValueError) as error:
        raise SubmitError(f"{where}: {' '.join(str(error).split())}") from None


def _there(client: Any, bucket: str, key: str, size: int) -> bool:
    from botocore.exceptions import ClientError

    try:
        return bool(client.head_object(Bucket=bucket, Key=key)["ContentLength"] == size)
    except ClientError as error:
        # Who may write and not list is told 403 of what is not there: the PUT says whether that was all.
        if error.response.get("Error", {}).get("Code") in (*_MISSING, "403"):
            return False
        raise
