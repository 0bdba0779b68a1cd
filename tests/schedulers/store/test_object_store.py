"""Uploads by content, to a store that lets its user write and read objects, but not list anything."""

from __future__ import annotations

from typing import Any

import pytest

from schedulers.store import object_store
from tests.needs import package


class WriteOnly:
    """A client of boto3's without permission to list."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.complete: list[int] = []

    def _deny(self, code: str, operation: str) -> Any:
        raise package("botocore.exceptions").ClientError({"Error": {"Code": code}}, operation)

    def head_object(self, **_: Any) -> Any:
        self._deny("403", "HeadObject")

    def get_paginator(self, operation: str) -> Any:
        self._deny("AccessDenied", operation)

    def create_multipart_upload(self, **_: Any) -> dict[str, str]:
        return {"UploadId": "1"}

    def upload_part(self, **part: Any) -> dict[str, str]:
        self.parts[part["PartNumber"]] = part["Body"]
        return {"ETag": "1"}

    def complete_multipart_upload(self, **upload: Any) -> None:
        self.complete = [part["PartNumber"] for part in upload["MultipartUpload"]["Parts"]]


def test_without_permission_to_list_a_large_object_is_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_PART", 4)
    client, data = WriteOnly(), b"0123456789"
    object_store.put_content(client, "bucket", "key", data)
    assert b"".join(client.parts[number] for number in client.complete) == data
    assert client.complete == [1, 2, 3]
