"""Requests to the REST API of a server, with its own message for an error, and uploads of code."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions
from urllib3.util import parse_url

from ..config.servers import Server
from ..errors import ConfigError, CredentialsExpired, SchedulerError, SpecError, UnknownJob, Unreachable
from ..printable import one_line

if TYPE_CHECKING:
    from ..store.snapshot import Snapshot

PREFIX = "/api/v1"

_CONNECT_S, _READ_S = 10.0, 60.0
_MAX_ATTEMPTS, _PAUSE_S, _MAX_PAUSE_S = 4, 0.5, 30.0
_RETRIED = (429, 502, 503, 504)


@dataclass(frozen=True)
class Answer:
    """A successful answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the document in the body. Raises Unreachable for anything else, such as a proxy's page."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise Unreachable("reply is not from accel serve: check the URL") from None


class RequestRefused(SpecError):
    """The server has refused the request. `status`: the HTTP status. `where`: the part of the request, if known."""

    def __init__(self, message: str, status: int, where: str = "") -> None:
        super().__init__(message)
        self.status, self.where = status, where


class Client:
    """A connection to one server, which is kept open between requests. Thread-safe."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._pool = _pool(server.url)

    def get(self, path: str, query: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        """Return the document at the path. Takes the settings of `request`, and raises what it raises."""
        return self.request("GET", path, query=query, **settings).json()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        document: object = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _READ_S,
        attempts: int = _MAX_ATTEMPTS,
    ) -> Answer:
        """Send a request, with a JSON document or bytes, and return the answer. Paths are below `/api/v1`.

        A server that is busy or cannot be reached gets `attempts` requests. Repeating one must be harmless, as it is
        for all but POST, which is sent once.

        Raises Unreachable if the server does not answer, CredentialsExpired if it wants another token, UnknownJob for
        status 404, and RequestRefused for other refusals.
        """
        body = data if document is None else json.dumps(document).encode("ascii")
        sent = {"Authorization": f"Bearer {self.server.token}", "Accept": "application/json", **(headers or {})}
        if document is not None:
            sent["Content-Type"] = "application/json"
        fields = {key: value for key, value in (query or {}).items() if value is not None}
        url = f"{self.server.url}{PREFIX}{quote(path)}" + (f"?{urlencode(fields)}" if fields else "")
        attempts = 1 if method == "POST" else attempts
        for attempt in range(1, attempts + 1):
            try:
                response = self._pool.request(
                    method, url, body=body, headers=sent, redirect=False,
                    timeout=urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
                )  # fmt: skip
            except exceptions.HTTPError as error:
                problem: SchedulerError = Unreachable(f"{self.server.name} does not answer ({_reason(error)})")
                pause_s = _PAUSE_S * attempt
                if isinstance(error, exceptions.TimeoutError) and not isinstance(error, exceptions.NewConnectionError):
                    break  # it has taken long enough
            else:
                if response.status < 300:
                    return Answer(response.status, response.headers, response.data)
                problem = self._problem(response.status, response.data, method)
                if response.status not in _RETRIED:
                    raise problem
                retry_after = response.headers.get("Retry-After", "")
                pause_s = float(retry_after) if retry_after.isdigit() else _PAUSE_S * attempt
            if attempt < attempts and pause_s <= _MAX_PAUSE_S:
                time.sleep(pause_s)
            else:
                break
        raise problem

    def _problem(self, status: int, body: bytes, method: str) -> SchedulerError:
        try:
            document = {"detail": ""} if method == "HEAD" else json.loads(body)  # whose answers have no body
            detail, where = str(document["detail"]), str(document.get("where", ""))
        except (ValueError, KeyError, TypeError):
            detail, where = one_line(body[:200].decode(errors="replace")) or "no details", ""
            if status in (404, 405) or status < 400:
                return Unreachable(f"{self.server.name}: {self.server.url} is not accel serve (status {status})")
        name = self.server.name
        if status == 401:
            return CredentialsExpired(f"{name}: {detail}: accel login {self.server.url}")
        if status in _RETRIED:
            return Unreachable(f"{name}: {detail}")
        if status == 404:
            return UnknownJob(f"{name}: {detail}")
        return RequestRefused(f"{name}: {detail}", status, where)


def _pool(url: str) -> urllib3.PoolManager:
    """Return a pool of connections, through the proxy in HTTPS_PROXY unless NO_PROXY excludes the URL's host.

    Raises ConfigError for a proxy that cannot be used.
    """
    parts = urlsplit(url)
    proxy = getproxies().get("https") if parts.scheme == "https" and not proxy_bypass(parts.netloc) else None
    if not proxy:
        return urllib3.PoolManager(retries=False, maxsize=8)
    try:
        parsed = parse_url(proxy if "://" in proxy else f"http://{proxy}")
        headers = urllib3.make_headers(proxy_basic_auth=unquote(parsed.auth)) if parsed.auth else None
        return urllib3.ProxyManager(parsed.url, proxy_headers=headers, retries=False, maxsize=8)
    except (exceptions.LocationParseError, exceptions.ProxySchemeUnknown):
        raise ConfigError("the variable HTTPS_PROXY must be http://HOST:PORT or https://HOST:PORT") from None


def _reason(error: Exception) -> str:
    if isinstance(error, exceptions.ProxyError):
        return f"the proxy in HTTPS_PROXY: {_reason(error.original_error)}"
    if isinstance(error, exceptions.SSLError):
        return f"TLS: {one_line(str(error))}"
    if isinstance(error, exceptions.NewConnectionError):
        cause = error.__cause__ or error.__context__
        return (getattr(cause, "strerror", None) or one_line(str(error).rpartition(": ")[2])).lower()
    if isinstance(error, exceptions.ProtocolError):  # its first argument is the same for all of them
        return one_line(str(error.args[-1]))
    if isinstance(error, exceptions.TimeoutError):
        return "timed out"
    return one_line(str(error))


# Uploads of a job's code, in pieces; one that was cut off is continued.

PIECE_BYTES = 1 << 20  # the limit of nginx's default configuration
_SMALL_BYTES = 1 << 16
_CONFLICT = 409
_MAX_CONFLICTS = 3


def send_code(client: Client, snapshot: Snapshot) -> None:
    """Send the snapshot, unless the server has it from this user. Raises what a request raises, and OSError."""
    path, conflicts = f"/code/{snapshot.digest}", 0
    is_small = os.path.exists(snapshot.path) and os.path.getsize(snapshot.path) <= _SMALL_BYTES
    offset = 0 if is_small else _offset(client, path)  # sending a little again is as fast as asking
    if offset is None:
        return
    size = os.path.getsize(snapshot.path)
    with open(snapshot.path, "rb") as file:
        while offset is not None:
            file.seek(offset)
            headers = {"Accel-Offset": str(offset), "Accel-Size": str(size)}
            piece = file.read(PIECE_BYTES)
            try:
                answer = client.request("PATCH", path, data=piece, headers=headers)
            except RequestRefused as error:
                # A repeated request whose first answer was lost, or another client of the same user.
                conflicts += 1
                if error.status != _CONFLICT or conflicts > _MAX_CONFLICTS:
                    raise
                offset = _offset(client, path)
                continue
            if answer.status == 201:
                return
            offset += len(piece)


def _offset(client: Client, path: str) -> int | None:
    """Return where the upload continues; None if it is complete."""
    try:
        headers = client.request("HEAD", path).headers
    except UnknownJob:
        return 0
    return None if headers.get("Accel-Complete") == "true" else int(headers["Accel-Offset"])
