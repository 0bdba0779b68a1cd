"""A plain client of an API server, for the tests themselves: one request, one answer, both dicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

Object = dict[str, Any]
MERGE = "application/merge-patch+json"


class Refused(Exception):
    """The server answered with an error. `status` is HTTP's, `reason` Kubernetes'."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class Credentials:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


class Client:
    """One user at one server, with a certificate or a token. May be used by several threads."""

    def __init__(self, server: str, authority: Path | None, credentials: Credentials | str) -> None:
        self.server = server
        files: Object = {}
        if isinstance(credentials, Credentials):
            files = {"cert_file": str(credentials.certificate), "key_file": str(credentials.key)}
        self._headers = (
            {"Authorization": f"Bearer {credentials}"} if isinstance(credentials, str) and credentials else {}
        )
        self._pool = urllib3.PoolManager(
            **files,
            ca_certs=authority and str(authority),
            # A server that has just begun opens the store of a custom kind when it is first asked for it.
            retries=urllib3.Retry(
                total=None,
                connect=0,
                read=0,
                redirect=0,
                other=0,
                status=30,
                status_forcelist=[429],
                allowed_methods={"GET"},
                raise_on_status=False,
            ),
            timeout=urllib3.Timeout(connect=5, read=60),
            maxsize=4,
        )

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """The answer. Raises Refused, and urllib3's errors of the network."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type, **self._headers}
        told: Object = json.loads(
            _checked(self._pool.request(method, self._url(path, query), body=data, headers=headers))
        )
        return told

    def text(self, path: str, *, query: Mapping[str, str] | None = None) -> str:
        """An answer that is no object. Raises as `call`."""
        return _checked(self._pool.request("GET", self._url(path, query), headers=self._headers)).decode()

    def open(self, path: str, *, query: Mapping[str, str] | None = None) -> urllib3.BaseHTTPResponse:
        """An answer that may go on: to be read, and given back (`release_conn`)."""
        return self._pool.request("GET", self._url(path, query), headers=self._headers, preload_content=False)

    def close(self) -> None:
        self._pool.clear()

    def _url(self, path: str, query: Mapping[str, str] | None) -> str:
        return f"{self.server}{path}" + (f"?{urlencode(query)}" if query else "")


def _checked(answer: urllib3.BaseHTTPResponse) -> bytes:
    if answer.status < 400:
        return answer.data
    try:
        said = json.loads(answer.data)
        raise Refused(answer.status, said.get("reason", ""), said.get("message", ""))
    except (ValueError, AttributeError):
        raise Refused(answer.status, "", answer.data.decode(errors="replace")) from None


def path_of(obj: Object, plural: str, *, named: bool = True) -> str:
    """Where the object is, or (`named=False`) where its like are."""
    version, metadata = str(obj["apiVersion"]), obj["metadata"]
    top = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    place = f"/namespaces/{metadata['namespace']}" if metadata.get("namespace") else ""
    return f"{top}{place}/{plural}" + (f"/{metadata['name']}" if named else "")
