"""The process behind tests/clusters/tpu.py: the Cloud TPU API over gRPC and REST, and the hosts of its slices.

    python -m tests.clusters.tpu_server 4     prints its ports, and serves until its input ends

It listens on loopback only: that of this computer, and with the same port that of every host, so that one address leads
to the API from everywhere. What a test asks comes as a line of JSON on standard input, and so does the answer.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # the programs that this process starts have nothing of gRPC

import grpc
from google.cloud import tpu_v2
from google.longrunning import operations_pb2

from . import ssh
from .tpu_metadata import Metadata
from .tpu_operations import Refused
from .tpu_queue import Service
from .tpu_rest import METHODS, Rest, Server
from .tpu_slices import METADATA_ADDRESS, SliceHosts

_LOOPBACK = "127.0.0.1"
_CONTROLS = (
    "allow", "calls", "configure", "deny", "down", "fail", "grant", "history", "hold", "maintenance", "nodes",
    "preempt", "queued", "reset", "resume", "set_state", "up", "workers",
)  # fmt: skip


class _Grpc(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Calls by gRPC, which carry no credentials: an insecure channel has none."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def service(self, details: Any) -> Any:
        name, _, method = details.method.strip("/").partition("/")
        if name == "google.longrunning.Operations" and method == "GetOperation":
            read = operations_pb2.GetOperationRequest.FromString
        elif name == "google.cloud.tpu.v2.Tpu" and method in METHODS:
            read = getattr(tpu_v2, f"{method}Request").deserialize
        else:
            return None

        def call(request: Any, context: Any) -> Any:
            try:
                return self._service.call(method, request, "test", "grpc")
            except Refused as error:
                context.abort(error.code, error.message)

        return grpc.unary_unary_rpc_method_handler(call, read, _serialized)


class _Endpoint:
    """The API and its listeners."""

    def __init__(self, hosts: ssh.SshHosts) -> None:
        self.service = Service(SliceHosts(hosts))
        self.grpc_port = self.rest_port = 0
        self._names = hosts.names
        self._grpc: Any = None
        self._rest: list[Server] = []
        for name in self._names:
            handler = type("OfHost", (Metadata,), {"service": self.service, "host": name})
            Server(self.service.hosts.listen(name, METADATA_ADDRESS, 80), handler)

    def up(self) -> None:
        """Listen, on the ports of before."""
        if self._grpc is not None:
            return
        handler = type("OfApi", (Rest,), {"service": self.service})
        listening = [socket.create_server((_LOOPBACK, self.rest_port))]
        self.rest_port = listening[0].getsockname()[1]
        listening += [self.service.hosts.listen(name, _LOOPBACK, self.rest_port) for name in self._names]
        self._rest = [Server(made, handler) for made in listening]
        self._grpc = grpc.server(ThreadPoolExecutor(16), handlers=[_Grpc(self.service)])
        self.grpc_port = self._grpc.add_insecure_port(f"{_LOOPBACK}:{self.grpc_port}")
        self._grpc.start()

    def down(self) -> None:
        """Refuse and cut connections; operations go on."""
        if self._grpc is not None:
            self._grpc.stop(None).wait()
            self._grpc = None
        for server in self._rest:
            server.close()
        self._rest = []

    def ask(self, line: str) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            if asked["method"] not in _CONTROLS:
                raise ValueError(asked["method"])
            owner = self if asked["method"] in ("up", "down") else self.service
            return {"result": getattr(owner, asked["method"])(**asked["arguments"])}
        except Exception as error:
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}


def _serialized(message: Any) -> bytes:
    serialize = getattr(type(message), "serialize", None)
    data: bytes = serialize(message) if serialize else message.SerializeToString()
    return data


def main(count: int) -> int:
    hosts = ssh.claim()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        hosts.up(count)
        with (hosts.box / "etc/hosts").open("a") as file:
            file.write(f"{METADATA_ADDRESS} metadata.google.internal\n")
        endpoint = _Endpoint(hosts)
        endpoint.up()
        ready = {"grpc": endpoint.grpc_port, "rest": endpoint.rest_port, "slot": hosts.network.slot.number}
        print(json.dumps(ready), flush=True)
        for line in sys.stdin:
            print(json.dumps(endpoint.ask(line)), flush=True)
        endpoint.down()
    except KeyboardInterrupt:
        pass
    finally:
        hosts.down()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
