"""A program that receives a blob on its host and forwards it to other hosts while it is still arriving.

It reads one line of JSON:

    {"root": "~/.accel", "digest": "…", "size": 1, "ports": [20000], "token": "…"}

It answers `{"have": false, "port": 20000}` (`null`: no port is free, or this host may not listen). Then it
reads any number of

    {"from": null}                    with the blob after it as raw bytes
    {"from": ["10.0.0.2", 20000]}     to receive it from the host that listens there

and answers each with `{"error": null}` or why the blob is not there. It forwards the blob to peers that prove
to know the token, until the input ends or nothing happens for a while. The receiver compares the digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import sys
import threading
import time

from .listen import listen_on_first
from .program import InvalidRequest, check_free_space, partial_path, write_all, write_reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CHUNK = 1 << 18
NONCE = 32
HANDSHAKE_S = 10.0
STALL_S = 20.0
LIFE_S = 300.0
MAX_CONCURRENT = 8


class Content:
    """A blob as it arrives: `have` bytes are in the file, more follow until it is complete or has failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.have = 0
        self.file = -1
        self.failed = False
        self.changed = threading.Condition()

    def grow(self, count: int) -> None:
        with self.changed:
            self.have += count
            self.changed.notify_all()

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def read_from(self, offset: int) -> bytes:
        """Wait for bytes from `offset` on and return some; none at the end, or if none arrive."""
        with self.changed:
            ready = self.changed.wait_for(lambda: self.failed or self.have > offset or self.have == self.size, STALL_S)
            available = self.have
        if not ready or self.failed or offset >= available:
            return b""
        return os.pread(self.file, min(CHUNK, available - offset), offset)


class Relay:
    """The blob on this host, and its transfers to other hosts."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.digest = request["digest"]
        self.size = request["size"]
        self.token = bytes.fromhex(request["token"])
        self.path = os.path.join(os.path.expanduser(request["root"]), "blobs", self.digest)
        self.content = Content(self.size)
        self.temporary = ""
        self.progress_at = time.monotonic()
        self.have = os.path.exists(self.path)
        if self.have:
            os.utime(self.path)  # its last use, for the removal of old ones
            self.content.file = os.open(self.path, os.O_RDONLY)
            self.content.have = os.fstat(self.content.file).st_size

    # Receiving.

    def get(self, source: list[Any] | None) -> None:
        if self.content.failed:
            self.content = Content(self.size)
        content = self.content
        try:
            self.write(content, self.from_input() if source is None else self.from_host(source[0], source[1]))
        except BaseException:
            content.fail()
            raise

    def write(self, content: Content, data: Iterator[bytes]) -> None:
        parent = os.path.dirname(self.path)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        check_free_space(parent, self.size, self.path)
        self.temporary = temporary = partial_path(self.path)
        hashed = hashlib.sha256()
        content.file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for chunk in data:
                hashed.update(chunk)
                write_all(content.file, chunk, temporary)
                self.progress_at = time.monotonic()
                content.grow(len(chunk))
            os.fsync(content.file)
            if hashed.hexdigest() != self.digest:
                raise InvalidRequest("the blob arrived damaged")
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def from_input(self) -> Iterator[bytes]:
        remaining = self.size
        while remaining:
            chunk = sys.stdin.buffer.read1(min(CHUNK, remaining))  # type: ignore[union-attr]  # standard input has it
            if not chunk:
                raise InvalidRequest("the transfer broke off")
            remaining -= len(chunk)
            yield chunk

    def from_host(self, address: str, port: int) -> Iterator[bytes]:
        with socket.create_connection((address, port), timeout=HANDSHAKE_S) as connection:
            peer_nonce, own_nonce = exactly(connection, NONCE), os.urandom(NONCE)
            connection.sendall(own_nonce + self.proof(b"get", peer_nonce, own_nonce))
            if not hmac.compare_digest(exactly(connection, NONCE), self.proof(b"give", peer_nonce, own_nonce)):
                raise InvalidRequest(f"{address} is not a host of this job")
            connection.settimeout(STALL_S)
            remaining = self.size
            while remaining:
                # Nothing comes on the input meanwhile: it is readable only at its end.
                readable = select.select([connection.fileno(), 0], [], [], STALL_S)[0]
                if 0 in readable:
                    raise InvalidRequest("the client is gone")
                chunk = connection.recv(min(CHUNK, remaining)) if readable else b""
                if not chunk:
                    raise InvalidRequest(f"{address} closed the connection")
                remaining -= len(chunk)
                yield chunk

    # Forwarding.

    def listen(self, ports: list[int]) -> int | None:
        server = None
        with contextlib.suppress(OSError):
            server = listen_on_first(ports)
        if server is None:
            return None
        threading.Thread(target=self.serve, args=(server,), daemon=True).start()
        return int(server.getsockname()[1])

    def serve(self, server: socket.socket) -> None:
        free = threading.Semaphore(MAX_CONCURRENT)
        while True:
            free.acquire()
            connection, _ = server.accept()
            threading.Thread(target=self.serve_peer, args=(connection, free), daemon=True).start()

    def serve_peer(self, connection: socket.socket, free: threading.Semaphore) -> None:
        try:
            with contextlib.suppress(OSError, InvalidRequest), connection:
                connection.settimeout(HANDSHAKE_S)
                own_nonce = os.urandom(NONCE)
                connection.sendall(own_nonce)
                peer_nonce = exactly(connection, NONCE)
                if not hmac.compare_digest(exactly(connection, NONCE), self.proof(b"get", own_nonce, peer_nonce)):
                    return
                connection.sendall(self.proof(b"give", own_nonce, peer_nonce))
                connection.settimeout(STALL_S)
                content, sent = self.content, 0
                while True:
                    chunk = content.read_from(sent)
                    if not chunk:
                        return
                    connection.sendall(chunk)
                    sent += len(chunk)
                    self.progress_at = time.monotonic()
        finally:
            free.release()

    def proof(self, purpose: bytes, server: bytes, client: bytes) -> bytes:
        return hmac.new(self.token, purpose + self.digest.encode() + server + client, hashlib.sha256).digest()


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise InvalidRequest("the other host closed the connection")
        data += chunk
    return data


def main() -> None:
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.readline())
    relay = Relay(request)
    write_reply({"have": relay.have, "port": relay.listen(request["ports"])})
    threading.Thread(target=exit_when_idle, args=(relay,), daemon=True).start()
    for line in iter(sys.stdin.buffer.readline, b""):
        relay.progress_at = time.monotonic()
        problem = None
        source = json.loads(line)["from"]
        try:
            relay.get(source)
        except InvalidRequest as error:
            problem = str(error)
        except OSError as error:
            problem = (error.strerror or str(error) or "no answer").lower()
        with contextlib.suppress(BrokenPipeError):
            write_reply({"error": problem})
        if problem is not None and source is None:
            break  # what is left of the content would be taken for the next request
    os._exit(0)


def exit_when_idle(relay: Relay) -> None:
    while time.monotonic() - relay.progress_at < LIFE_S:
        time.sleep(1)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(relay.temporary)
    os._exit(1)
