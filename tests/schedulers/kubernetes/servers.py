"""An HTTP server that says what it is told to, and a proxy: for what a real API server does rarely, or never here."""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.clusters.kube.pki import Authority

Answer = tuple[int, dict[str, str], bytes] | Callable[[BaseHTTPRequestHandler], None]


def said(status: int, body: object = None, **headers: str) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
    return status, {key.replace("_", "-"): value for key, value in headers.items()}, data


def refused(status: int, reason: str, message: str, **details: object) -> Answer:
    body = {"kind": "Status", "status": "Failure", "reason": reason, "message": message, "details": details}
    return said(status, body)


def reply(handler: BaseHTTPRequestHandler, body: object) -> None:
    """What a function that answers says: bytes as they are, else JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Connection", "close")  # as the server does then: else a PATCH may meet its end
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def cut(handler: BaseHTTPRequestHandler) -> None:
    """Breaks off in the middle of an answer."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"half": ')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


def hung_up(handler: BaseHTTPRequestHandler) -> None:
    """Reads the question and says nothing."""
    handler.connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Server:
    """Gives its answers in their order, and the last one for ever."""

    answers: list[Answer]
    url: str = ""
    questions: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    certificates: list[str] = field(default_factory=list)

    @property
    def asked(self) -> list[str]:
        return [f"{method} {path}" for method, path, _, _ in self.questions]


@contextlib.contextmanager
def serving(*answers: Answer, tls: tuple[Path, Path] | None = None, authority: Path | None = None) -> Iterator[Server]:
    """On a port of 127.0.0.1; with `tls`, a certificate and its key, and an authority of the clients' certificates."""
    server = Server(list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        asked = b""

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if isinstance(self.connection, ssl.SSLSocket) and (shown := self.connection.getpeercert()):
                server.certificates.append(str(shown["subject"]))
            self.asked = body
            server.questions.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            found = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
            if callable(found):
                self.close_connection = True
                found(self)
                return
            status, headers, data = found
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def __getattr__(self, name: str) -> Callable[[], None]:
            if name.startswith("do_"):
                return self.answer
            raise AttributeError(name)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a handshake that the client did not like

    with Quiet(("127.0.0.1", 0), Handler) as http:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*map(str, tls))
            if authority is not None:
                context.load_verify_locations(str(authority))
                context.verify_mode = ssl.CERT_OPTIONAL
            http.socket = context.wrap_socket(http.socket, server_side=True, do_handshake_on_connect=False)
        server.url = f"http{'s' if tls else ''}://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


@dataclass
class Proxy:
    """A proxy for HTTPS. With `user`, NAME:PASSWORD, it wants to be told so."""

    url: str = ""
    connected: list[str] = field(default_factory=list)


@contextlib.contextmanager
def proxying(user: str | None = None) -> Iterator[Proxy]:
    proxy = Proxy()
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    proxy.url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(4096)
            lines = head.decode().split("\r\n")
            method, where, _ = lines[0].split()
            wanted = user and f"proxy-authorization: basic {base64.b64encode(user.encode()).decode()}".lower()
            if wanted and wanted not in [line.lower() for line in lines]:
                connection.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
                return
            assert method == "CONNECT"
            proxy.connected.append(where)
            host, port = where.rsplit(":", 1)
            with socket.create_connection((host, int(port))) as onward:
                connection.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                relay(connection, onward)

    def relay(one: socket.socket, other: socket.socket) -> None:
        while not over.is_set():
            for ready in select.select([one, other], [], [], 0.1)[0]:
                data = ready.recv(1 << 16)
                if not data:
                    return
                (other if ready is one else one).sendall(data)

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield proxy
    finally:
        over.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def authority(directory: Path) -> Authority:
    made = Authority(directory)
    made.create()
    return made
