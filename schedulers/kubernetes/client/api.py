"""A client of one API server as one user: requests, watches and exec with plain dictionaries.

It uses the official client's `ApiClient`, whose import takes 0.25 s: only the first request pays that.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from ...errors import ConfigError, Unreachable
from ..options import KubernetesOptions
from . import kubeconfig
from .credentials import Credentials
from .errors import Forbidden, NotFound, error_of, unreachable, warnings_of
from .kubeconfig import Access

if TYPE_CHECKING:
    import urllib3

_RETRY_DELAYS_S = (0.1, 0.4, 1.0)
_LONGEST_WAIT_S = 5.0
_RETRIED_METHODS = ("GET", "PUT", "DELETE", "HEAD")
_BUSY = (429, 500, 502, 503, 504)
_PIECE = 1 << 16
_PAGE = "500"
_CONNECT_S = 10.0

Query = Mapping[str, str | Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A request. `timeout_s`: the longest silence, or None without a limit."""

    method: str
    path: str
    query: Query | None
    body: object = None
    headers: Mapping[str, str]
    timeout_s: float | None

    @property
    def repeatable(self) -> bool:
        """True if it may be repeated even if the first one may have arrived."""
        return self.method in _RETRIED_METHODS


class Api:
    """A client of one cluster as one user. Thread-safe.

    Opens no connection, reads no file and imports nothing before the first request.
    """

    def __init__(self, options: KubernetesOptions, target: str) -> None:
        self._options = options
        self.target = target  # its name, for messages
        self._lock = threading.RLock()
        self._access: Access | None = None
        self._credentials_cache: Credentials | None = None
        self._api_client: Any = None  # an ApiClient
        self._discovered: set[str] | None = None
        self._ahead_s = 0.0

    @property
    def access(self) -> Access:
        """The cluster and user, from the kubeconfig. Raises ConfigError."""
        with self._lock:
            if self._access is None:
                self._access = kubeconfig.find(self._options, self.target)
            return self._access

    @property
    def namespace(self) -> str:
        """The namespace: the option, else the context's, else `default`."""
        return self.access.namespace

    @property
    def server(self) -> str:
        return self.access.server

    @property
    def identity(self) -> str:
        """A key, equal for equal server, user and namespace."""
        access = self.access
        return "\0".join((access.server, access.files or "", access.context or "", access.namespace))

    def path(
        self,
        api_version: str,
        plural: str,
        name: str | None = None,
        sub: str | None = None,
        namespace: str | None = None,
    ) -> str:
        """Return the path of a list, an object or a part of one. `namespace` "" is for cluster-scoped objects."""
        root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
        scope = self.namespace if namespace is None else namespace
        segments = ("namespaces" if scope else None, scope, plural, name, sub)
        return "/".join([root, *(quote(segment, safe="/") for segment in segments if segment)])

    def call(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: object = None,
        content_type: str = "application/json",
        timeout_s: float = 30.0,
        on_warning: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Send a request and return the response. Call `on_warning` for each warning in it.

        Retries for up to 2 s if the API server is busy or unreachable and the request may be repeated.

        Raises an ApiError for a refusal, Unreachable without a response, ConfigError if no request can be sent.
        """
        # Servers compress long lists only.
        headers = {"accept": "application/json", "accept-encoding": "gzip"}
        headers |= {} if body is None else {"content-type": content_type}
        request = _Request(method=method, path=path, query=query, body=body, headers=headers, timeout_s=timeout_s)
        response, warnings = self._body_of(request)
        try:
            reply = json.loads(response) if response.strip() else {}
        except ValueError:
            cause = f"it answers {method} {path} with no JSON: {response[:80]!r}"
            raise Unreachable(f"{self.label}: the API server {self.access.display_url}: {cause}") from None
        if on_warning is not None:
            for text in warnings:
                on_warning(text)
        return reply if isinstance(reply, dict) else {"items": reply}

    def pages(self, path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the pages of a list. Adds the kind and API version to each item, which lists omit."""
        continuation: dict[str, str] = {}
        while True:
            page = self.call("GET", path, query={**query, "limit": _PAGE, **continuation})
            kind = str(page.get("kind") or "").removesuffix("List")
            for resource in page.get("items") or []:
                resource.setdefault("kind", kind)
                resource.setdefault("apiVersion", page.get("apiVersion"))
            yield page
            continuation = {"continue": (page.get("metadata") or {}).get("continue") or ""}
            if not continuation["continue"]:
                return

    def items(self, path: str, query: Mapping[str, str]) -> Iterator[dict[str, Any]]:
        """Yield the selected objects of a collection, page by page."""
        for page in self.pages(path, query):
            yield from page.get("items") or []

    def get_or_none(self, path: str) -> dict[str, Any] | None:
        """Return the object at `path`, or None on 404. Raises as `call`."""
        try:
            return self.call("GET", path)
        except NotFound:
            return None

    def stream(self, path: str, *, query: Query | None = None, idle_s: float | None = None) -> Stream:
        """Return a response that is read as it arrives. Raises the errors of `call`.

        Reading raises Unreachable when the connection breaks, or when nothing has arrived for `idle_s` seconds.
        """
        request = _Request(method="GET", path=path, query=query, headers={"accept": "*/*"}, timeout_s=idle_s)
        return Stream(self._respond(request), self)

    def versions(self) -> set[str]:
        """Return the API versions of the cluster: `v1`, `batch/v1`, `kubeflow.org/v1`, …. Queried once."""
        if self._discovered is None:
            groups = self.call("GET", "/apis").get("groups") or []
            versions = {str(version["groupVersion"]) for group in groups for version in group.get("versions") or []}
            self._discovered = versions | {"v1"}
        return self._discovered

    def version(self) -> tuple[int, int] | None:
        """Return the version of Kubernetes, such as (1, 34), or None if the server does not report it."""
        with contextlib.suppress(Forbidden, NotFound, ValueError, KeyError):
            reply = self.call("GET", "/version")
            return int(reply["major"]), int(str(reply["minor"]).rstrip("+"))
        return None

    def now(self) -> float:
        """Return the server's time by its last response, else this machine's, in seconds since the epoch."""
        return time.time() + self._ahead_s

    def connect(
        self, pod: str, argv: Sequence[str], *, container: str | None = None, tty: bool = False, stdin: bool = False,
        namespace: str | None = None,
    ) -> Any:  # fmt: skip
        """Run a program in a pod's container and return its streams, a `kubernetes.stream.ws_client.WSClient`.

        Raises ApiError, Unreachable, ConfigError.
        """
        query: dict[str, str | Sequence[str]] = {
            "command": list(argv), "stdout": "true", "stderr": "false" if tty else "true",
            "stdin": str(stdin).lower(), "tty": str(tty).lower(),
        }  # fmt: skip
        if container is not None:
            query["container"] = container
        url = self._url(self.path("v1", "pods", pod, "exec", namespace), query)
        auth_headers = self._credentials().headers()
        configuration = self._credentials().configuration()
        import websocket
        from kubernetes.stream import ws_client

        # The client forwards only these two headers: the impersonation headers follow as further lines of one.
        protocols = f"{ws_client.V5_CHANNEL_PROTOCOL},{ws_client.V4_CHANNEL_PROTOCOL}"
        extra_lines = "".join(f"\r\n{name}: {value}" for name, value in auth_headers if name != "authorization")
        headers = {**dict(auth_headers), "sec-websocket-protocol": protocols + extra_lines}
        client_class: Any = ws_client.WSClient
        try:
            return client_class(configuration, "ws" + url.removeprefix("http"), headers, capture_all=False, binary=True)
        except websocket.WebSocketBadStatusException as error:
            body = bytes(error.resp_body or b"")
            raise error_of(error.status_code, body, subject=self.label, user=self.access.user_label) from None
        except (websocket.WebSocketException, OSError) as error:
            raise unreachable(error, self.label, self.access.display_url, configuration.proxy) from None

    def close(self) -> None:
        """Close the idle connections. They are reopened when needed."""
        with self._lock:
            if self._api_client is not None:
                self._api_client.close()
            self._api_client = None

    @property
    def label(self) -> str:
        """The prefix of messages."""
        return f"target {self.target}"

    def unreachable(self, error: Exception) -> Unreachable:
        proxy = None if self._api_client is None else self._api_client.configuration.proxy
        return unreachable(error, self.label, self.access.display_url, proxy)

    def _credentials(self) -> Credentials:
        with self._lock:
            if self._credentials_cache is None:
                self._credentials_cache = Credentials(self.access, self.target)
            return self._credentials_cache

    def _client(self) -> Any:
        """Return the client, which connects when needed."""
        configuration = self._credentials().configuration()
        from kubernetes.client import ApiClient

        with self._lock:
            if self._api_client is None or self._api_client.configuration is not configuration:
                self.close()
                self._api_client = ApiClient(configuration)
            return self._api_client

    def _url(self, path: str, query: Query | None) -> str:
        return f"{self.server}{path}{'?' + urlencode(query, doseq=True) if query else ''}"

    def _body_of(self, request: _Request) -> tuple[bytes, list[str]]:
        """Return the body and the warnings of the response."""
        import urllib3

        for wait in (*_RETRY_DELAYS_S, None):
            response = self._respond(request)
            try:
                return bytes(response.read()), warnings_of(response.headers.getlist("warning"))
            except (urllib3.exceptions.HTTPError, OSError) as error:
                if not request.repeatable or wait is None:
                    raise self.unreachable(error) from None
                time.sleep(wait)
            finally:
                response.release_conn()
        raise AssertionError

    def _respond(self, request: _Request) -> urllib3.BaseHTTPResponse:
        """Send the request, with retries. Return the successful response, its body unread."""
        renewed = False
        pauses = list(_RETRY_DELAYS_S)
        while True:
            credential = self._credentials().plugin_status()
            response = self._send_once(request, pauses)
            if 200 <= response.status < 300:
                return response
            error_body = self._rest(response)
            if response.status == 401 and not renewed and self._credentials().renew(credential):
                renewed = True
                self.close()  # a new certificate needs new connections
                continue
            if response.status in _BUSY and pauses and (request.repeatable or response.status == 429):
                _pause(pauses.pop(0), response.headers.get("retry-after"))
                continue
            refusal = error_of(response.status, error_body, subject=self.label, user=self.access.user_label)
            if response.status in _BUSY:
                text = str(refusal).removeprefix(f"{self.label}: ")
                server = f"{self.label}: the API server {self.access.display_url}"
                raise Unreachable(f"{server} answers {response.status}: {text}")
            raise refusal

    def _send_once(self, request: _Request, pauses: list[float]) -> urllib3.BaseHTTPResponse:
        client = self._client()
        from email.utils import mktime_tz, parsedate_tz

        from kubernetes.client.exceptions import ApiException
        from urllib3 import HTTPHeaderDict, exceptions

        headers = HTTPHeaderDict({"user-agent": "accel", **request.headers})
        headers.extend(self._credentials().headers())
        url, timeouts = self._url(request.path, request.query), (_CONNECT_S, request.timeout_s)
        while True:
            sent_at = time.time()
            try:
                reply = client.call_api(request.method, url, headers, request.body, _request_timeout=timeouts)
                response: urllib3.BaseHTTPResponse = reply.response
                if (date := parsedate_tz(response.headers.get("date"))) is not None:
                    self._ahead_s = _ahead(mktime_tz(date), sent_at, time.time())
                return response
            except (ApiException, exceptions.HTTPError, OSError) as error:  # ApiException is the client's error for TLS
                never_sent = isinstance(error, exceptions.NewConnectionError)
                timed_out = isinstance(error, exceptions.TimeoutError) and not never_sent
                if not pauses or timed_out or isinstance(error, ApiException) or not (never_sent or request.repeatable):
                    raise self.unreachable(error) from None
                time.sleep(pauses.pop(0))
            except ValueError as error:  # an invalid URL or header
                raise ConfigError(f"{self.label}: {self.access.display_url}: {error}") from None

    def _rest(self, response: urllib3.BaseHTTPResponse) -> bytes:
        import urllib3

        try:
            return bytes(response.read())
        except (urllib3.exceptions.HTTPError, OSError):
            return b""
        finally:
            response.release_conn()


class Stream:
    """The body of a response, in chunks as they arrive. One thread reads it, and any may close it."""

    def __init__(self, response: urllib3.BaseHTTPResponse, api: Api) -> None:
        self._response = response
        self._api = api
        self._lock = threading.Lock()
        self._closed = self._has_reader = False
        self._release = response.release_conn
        response.release_conn = self._release_connection  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[bytes]:
        """Yield chunks until the API server ends the stream or `close`. Raises Unreachable when it breaks."""
        import urllib3

        with self._lock:
            if self._closed:
                return
            self._has_reader = True
        try:
            yield from self._response.stream(_PIECE)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if not self._closed:
                raise self._api.unreachable(error) from None
        finally:
            with self._lock:
                self._closed = True
            self._response.close()

    def close(self) -> None:
        """End the stream, from any thread: a blocked read returns at once."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sock = getattr(self._response.connection, "sock", None)
            if sock is not None:
                with contextlib.suppress(OSError):  # it has ended already
                    # Not SSLSocket's own, which discards the TLS state while another thread reads with it.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        if not self._has_reader:  # else the reader closes the response: two threads must not
            self._response.close()

    def _release_connection(self) -> None:
        """Return the connection to the pool at the body's end, unless `close` has shut it down."""
        with self._lock:
            if not self._closed:
                self._release()


def _pause(seconds: float, retry_after: str | None) -> None:
    if retry_after is not None and retry_after.isdigit():
        seconds = max(seconds, min(float(retry_after), _LONGEST_WAIT_S))
    time.sleep(seconds)


def _ahead(date: float, sent: float, received: float) -> float:
    """Return the smallest lead of the server's clock in seconds that `date`, in whole seconds, allows."""
    lower, upper = date - received, date + 1 - sent
    return lower if lower > 0 else min(upper, 0.0)


def hang_up(client: Any) -> None:
    """Shut the connection down without a closing handshake. Raises OSError, WebSocketException.

    The handshake would block, and would leave the socket open if the server has gone.
    """
    client.sock.shutdown()
