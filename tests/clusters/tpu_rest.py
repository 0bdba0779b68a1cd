"""The tests' Cloud TPU API over HTTP: the methods' REST form, as gcloud and the Python client speak it, and the
project's description of the Compute API, which `gcloud compute tpus tpu-vm ssh` reads."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.cloud import tpu_v2
from google.longrunning import operations_pb2
from google.protobuf import json_format

from .tpu import PROJECT
from .tpu_operations import Refused, to_dict
from .tpu_queue import Service

__all__ = ["METHODS", "Rest", "Server"]

_PARENT = r"(?P<parent>projects/[^/]+/locations/[^/]+)"
_NAME = r"(?P<name>projects/[^/]+/locations/[^/]+/{}/[^/:]+)"
# Verb, path, method of the API, and the field of its request that the body is ("*": the body is the request).
_ROUTES = [
    ("GET", f"{_PARENT}/nodes", "ListNodes", ""),
    ("POST", f"{_PARENT}/nodes", "CreateNode", "node"),
    ("GET", _NAME.format("nodes"), "GetNode", ""),
    ("PATCH", _NAME.format("nodes"), "UpdateNode", "node"),
    ("DELETE", _NAME.format("nodes"), "DeleteNode", ""),
    ("POST", f"{_NAME.format('nodes')}:stop", "StopNode", "*"),
    ("POST", f"{_NAME.format('nodes')}:start", "StartNode", "*"),
    ("POST", f"{_NAME.format('nodes')}:getGuestAttributes", "GetGuestAttributes", "*"),
    ("GET", f"{_PARENT}/queuedResources", "ListQueuedResources", ""),
    ("POST", f"{_PARENT}/queuedResources", "CreateQueuedResource", "queuedResource"),
    ("GET", _NAME.format("queuedResources"), "GetQueuedResource", ""),
    ("DELETE", _NAME.format("queuedResources"), "DeleteQueuedResource", ""),
    ("GET", _NAME.format("operations"), "GetOperation", ""),
]
METHODS = [method for _, _, method, _ in _ROUTES]
# Query parameters that Google's front end takes for every method.
_SYSTEM = re.compile(r"\$.*|alt|prettyPrint|quotaUser|fields|key|access_token|callback|uploadType|upload_protocol")
_STATUS = {
    "INVALID_ARGUMENT": 400, "FAILED_PRECONDITION": 400, "OUT_OF_RANGE": 400, "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "ABORTED": 409, "ALREADY_EXISTS": 409, "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499, "UNIMPLEMENTED": 501, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip


class Server(ThreadingHTTPServer):
    """An HTTP server on a socket that listens already; `close` cuts its connections."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, handler: Callable[..., BaseHTTPRequestHandler]) -> None:
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self._open: set[socket.socket] = set()
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that is gone is no error."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Rest(BaseHTTPRequestHandler):
    """A request of a client."""

    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, *_: Any) -> None:
        """Nothing: every call is recorded."""

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if url.path == "/token" and self.command == "POST":
                self._reply(200, _token(urllib.parse.parse_qs(body.decode())["assertion"][0]))
            elif url.path == f"/compute/v1/projects/{PROJECT}" and self.command == "GET":
                self._reply(200, _PROJECT)
            else:
                self._reply(200, to_dict(self._call(url.path, urllib.parse.parse_qs(url.query), body)))
        except Refused as error:
            name = error.code.name
            status = _STATUS.get(name, 500)
            self._reply(status, {"error": {"code": status, "message": error.message, "status": name}})

    do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815  # as http.server calls them

    def _call(self, path: str, query: dict[str, list[str]], body: bytes) -> Any:
        version, _, resource = urllib.parse.unquote(path).lstrip("/").partition("/")
        matches = ((re.fullmatch(route[1], resource), route) for route in _ROUTES if route[0] == self.command)
        match, route = next((pair for pair in matches if pair[0]), (None, None))
        if match is None or route is None or version not in ("v2", "v2alpha1"):
            raise Refused("NOT_FOUND", f"The tests' Cloud TPU API has no {self.command} {path}")
        _, _, method, body_field = route
        fields: dict[str, Any] = {key: values[0] for key, values in query.items() if not _SYSTEM.fullmatch(key)}
        if "force" in fields:
            fields["force"] = fields["force"].lower() == "true"  # gcloud writes True
        sent = json.loads(body or b"{}")
        fields |= sent if body_field == "*" else {body_field: sent} if body_field else {}
        if method == "UpdateNode":
            fields["node"]["name"] = match["name"]
        else:
            fields |= match.groupdict()
        request = (operations_pb2 if method == "GetOperation" else tpu_v2).__dict__[f"{method}Request"]()
        plain = request if method == "GetOperation" else type(request).pb(request)
        try:
            # gcloud's alpha commands talk to v2alpha1, which has more fields.
            json_format.ParseDict(fields, plain, ignore_unknown_fields=version == "v2alpha1")
        except json_format.ParseError as error:
            raise Refused("INVALID_ARGUMENT", f"Invalid JSON payload received. {error}") from None
        return self.service.call(method, request, self._caller(), "rest")

    def _caller(self) -> str:
        """gcloud, or the account of the credentials. Raises Refused."""
        if "gcloud" in self.headers.get("User-Agent", ""):
            return "gcloud"  # which is told to send no credentials
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        if kind != "Bearer":
            raise Refused("UNAUTHENTICATED", "Request is missing required authentication credential.")
        if token.startswith("ya29."):  # an access token of the metadata server
            return token.removeprefix("ya29.")
        return _issuer(token)

    def _reply(self, status: int, fields: Any) -> None:
        body = json.dumps(fields).encode()
        self.send_response(status, HTTPStatus(status).phrase if status != 499 else "Client Closed Request")
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _issuer(token: str) -> str:
    """The account that has signed a JSON Web Token; its signature is not verified."""
    claims = token.split(".")[1]
    account: str = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["iss"]
    return account


def _token(assertion: str) -> dict[str, Any]:
    """An access token, as oauth2.googleapis.com has it for a service account's key."""
    return {"access_token": f"ya29.{_issuer(assertion)}", "expires_in": 3599, "token_type": "Bearer"}


_PROJECT = {
    "kind": "compute#project",
    "id": "1",
    "name": PROJECT,
    "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": "eA==", "items": []},
}
