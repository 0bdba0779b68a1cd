"""The metadata server that the hosts of a slice see at 169.254.169.254.

https://docs.cloud.google.com/compute/docs/metadata/predefined-metadata-keys; `worker-network-endpoints`,
`agent-worker-number`, `accelerator-type` and `tpu-env` (here its lines that accel reads) are those of TPU VMs.
"""

from __future__ import annotations

import json
import urllib.parse
import zlib
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

from .tpu import PROJECT
from .tpu_nodes import Slice, place
from .tpu_queue import Service
from .tpu_slices import topology

__all__ = ["Metadata"]

_PREFIX = "/computeMetadata/v1/"


class Metadata(BaseHTTPRequestHandler):
    """A request from one host."""

    protocol_version = "HTTP/1.1"
    service: Service
    host: str

    def log_message(self, *_: Any) -> None:
        """Nothing: the hosts ask often."""

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        member = self.service.of_host(self.host)
        if self.headers.get("Metadata-Flavor") != "Google":
            self._reply(403, "Missing Metadata-Flavor:Google header.")
        elif not url.path.startswith(_PREFIX) or member is None:
            self._reply(200 if url.path == "/" else 404, "computeMetadata/\n" if url.path == "/" else "not found")
        else:
            query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
            key = url.path.removeprefix(_PREFIX)
            if query.get("wait_for_change") == "true":
                self._wait(key, query)
            self._find(key, query.get("recursive") == "true", self._values())

    def _values(self) -> dict[str, str]:
        member = self.service.of_host(self.host)
        return {} if member is None else _values(*member, self.host)

    def _wait(self, key: str, query: Mapping[str, str]) -> None:
        """Wait until the value differs from that of `last_etag`, or else from what it is now."""
        before = query.get("last_etag") or _etag(self._values().get(key, ""))
        seconds = float(query["timeout_sec"]) if "timeout_sec" in query else None
        with self.service.changed:
            self.service.changed.wait_for(lambda: _etag(self._values().get(key, "")) != before, seconds)

    def _find(self, key: str, recursive: bool, values: dict[str, str]) -> None:
        if key in values:
            kind = "application/json" if values[key].startswith("{") else "application/text"
            self._reply(200, values[key], kind)
            return
        inside = {name.removeprefix(key): value for name, value in values.items() if name.startswith(key)}
        if not key.endswith("/") or not inside:
            self._reply(404, "not found")
        elif recursive:
            lists = ("scopes", "aliases")
            flat = {name: value.split() if name in lists else value for name, value in inside.items()}
            self._reply(200, json.dumps(flat), "application/json")
        else:
            self._reply(200, "".join(f"{name}\n" for name in inside))

    def _reply(self, status: int, text: str, kind: str = "application/text") -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", kind)
        self.send_header("ETag", _etag(text))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _etag(text: str) -> str:
    return f"{zlib.crc32(text.encode()):016x}"


def _values(slice_: Slice, worker: int, host: str) -> dict[str, str]:
    node = slice_.node
    addresses = [endpoint.ip_address for endpoint in node.network_endpoints]
    account = node.service_account.email
    token = {"access_token": f"ya29.{account}", "expires_in": 3599, "token_type": "Bearer"}
    attributes = {
        "accelerator-type": node.accelerator_type,
        "agent-worker-number": str(worker),
        "instance-id": node.name.rpartition("/")[2],
        "tpu-env": (
            f"ACCELERATOR_TYPE: '{node.accelerator_type}'\nTOPOLOGY: '{topology(node.accelerator_type)}'\n"
            f"WORKER_ID: '{worker}'\n"
        ),
        "worker-network-endpoints": ",".join(f"unknown:unknown:{address}" for address in addresses),
        **node.metadata,
    }
    return {
        "project/project-id": PROJECT,
        "instance/id": str(node.id * 1000 + worker),
        "instance/name": host,
        "instance/hostname": host,
        "instance/zone": f"projects/1/zones/{place(node.name, 'nodes')}",
        "instance/maintenance-event": slice_.maintenance,
        "instance/preempted": "TRUE" if slice_.preempted else "FALSE",
        "instance/service-accounts/default/aliases": "default",
        "instance/service-accounts/default/email": account,
        "instance/service-accounts/default/scopes": "https://www.googleapis.com/auth/cloud-platform",
        "instance/service-accounts/default/token": json.dumps(token),
        **{f"instance/attributes/{key}": value for key, value in attributes.items()},
    }
