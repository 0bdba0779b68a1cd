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
import errno
import hashlib
import hmac
import json
import os
import select
import socket
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

CHUNK = 1 << 18
NONCE = 32
GREETING_S = 10.0
STALL_S = 20.0
LIFE_S = 300.0
AT_ONCE = 8


class Refused(Exception):
    """An error with one line for people."""


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

    def from_on(self, offset: int) -> bytes:
        """Wait for bytes from `offset` on and return some; none at the end, or if none arrive."""
        with self.changed:
            ready = self.changed.wait_for(lambda: self.failed or self.have > offset or self.have == self.size, STALL_S)
            there = self.have
        if not ready or self.failed or offset >= there:
            return b""
        return os.pread(self.file, min(CHUNK, there - offset), offset)


class Passing:
    """The blob on this host, and its transfers to other hosts."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.digest = request["digest"]
        self.size = request["size"]
        self.token = bytes.fromhex(request["token"])
        self.path = os.path.join(os.path.expanduser(request["root"]), "blobs", self.digest)
        self.content = Content(self.size)
        self.temporary = ""
        self.moved = time.monotonic()
        self.have = os.path.exists(self.path)
        if self.have:
            os.utime(self.path)  # in use: what removes old ones can see that
            self.content.file = os.open(self.path, os.O_RDONLY)
            self.content.have = os.fstat(self.content.file).st_size

    # Getting it.

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
        found = os.statvfs(parent)
        if found.f_bavail * found.f_frsize < self.size:
            raise Refused("disk full")
        self.temporary = temporary = os.path.join(parent, f".{self.digest}.{os.getpid()}.{os.urandom(4).hex()}.part")
        hashed = hashlib.sha256()
        content.file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for piece in data:
                hashed.update(piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(content.file, rest) :]
                self.moved = time.monotonic()
                content.grow(len(piece))
            os.fsync(content.file)
            if hashed.hexdigest() != self.digest:
                raise Refused("it arrived damaged")
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    def from_input(self) -> Iterator[bytes]:
        left = self.size
        while left:
            piece = sys.stdin.buffer.read1(min(CHUNK, left))  # type: ignore[union-attr]  # standard input has it
            if not piece:
                raise Refused("the transfer broke off")
            left -= len(piece)
            yield piece

    def from_host(self, address: str, port: int) -> Iterator[bytes]:
        with socket.create_connection((address, port), timeout=GREETING_S) as connection:
            theirs, mine = exactly(connection, NONCE), os.urandom(NONCE)
            connection.sendall(mine + self.proof(b"get", theirs, mine))
            if not hmac.compare_digest(exactly(connection, NONCE), self.proof(b"give", theirs, mine)):
                raise Refused(f"{address} is not of this job")
            connection.settimeout(STALL_S)
            left = self.size
            while left:
                # Nobody says anything on the input meanwhile: what can be read there is its end.
                readable = select.select([connection.fileno(), 0], [], [], STALL_S)[0]
                if 0 in readable:
                    raise Refused("nobody waits for it any more")
                piece = connection.recv(min(CHUNK, left)) if readable else b""
                if not piece:
                    raise Refused(f"{address} broke off")
                left -= len(piece)
                yield piece

    # Passing it on.

    def listen(self, ports: list[int]) -> int | None:
        for port in ports:
            try:
                server = socket.create_server(("", port), backlog=64)
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                return None
            bound = int(server.getsockname()[1])
            servers = [server]
            with contextlib.suppress(OSError, ValueError):
                servers.append(socket.create_server(("::", bound), family=socket.AF_INET6, backlog=64))
            for each in servers:
                threading.Thread(target=self.serve, args=(each,), daemon=True).start()
            return bound
        return None

    def serve(self, server: socket.socket) -> None:
        free = threading.Semaphore(AT_ONCE)
        while True:
            free.acquire()
            connection, _ = server.accept()
            threading.Thread(target=self.give, args=(connection, free), daemon=True).start()

    def give(self, connection: socket.socket, free: threading.Semaphore) -> None:
        try:
            with contextlib.suppress(OSError, Refused), connection:
                connection.settimeout(GREETING_S)
                mine = os.urandom(NONCE)
                connection.sendall(mine)
                theirs = exactly(connection, NONCE)
                if not hmac.compare_digest(exactly(connection, NONCE), self.proof(b"get", mine, theirs)):
                    return
                connection.sendall(self.proof(b"give", mine, theirs))
                connection.settimeout(STALL_S)
                content, sent = self.content, 0
                while True:
                    piece = content.from_on(sent)
                    if not piece:
                        return
                    connection.sendall(piece)
                    sent += len(piece)
                    self.moved = time.monotonic()
        finally:
            free.release()

    def proof(self, what: bytes, server: bytes, client: bytes) -> bytes:
        return hmac.new(self.token, what + self.digest.encode() + server + client, hashlib.sha256).digest()


def exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise Refused("the other host said too little")
        data += piece
    return data


def main() -> None:
    os.umask(0o077)
    request = json.loads(sys.stdin.buffer.readline())
    passing = Passing(request)
    answer({"have": passing.have, "port": passing.listen(request["ports"])})
    threading.Thread(target=end_when_nothing_moves, args=(passing,), daemon=True).start()
    for line in iter(sys.stdin.buffer.readline, b""):
        passing.moved = time.monotonic()
        problem = None
        source = json.loads(line)["from"]
        try:
            passing.get(source)
        except Refused as error:
            problem = str(error)
        except OSError as error:
            problem = (error.strerror or str(error) or "no answer").lower()
        with contextlib.suppress(BrokenPipeError):
            answer({"error": problem})
        if problem is not None and source is None:
            break  # what is left of the content would be taken for the next request
    os._exit(0)


def end_when_nothing_moves(passing: Passing) -> None:
    while time.monotonic() - passing.moved < LIFE_S:
        time.sleep(1)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(passing.temporary)
    os._exit(1)


def answer(line: object) -> None:
    sys.stdout.buffer.write(json.dumps(line).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
