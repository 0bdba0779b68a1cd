"""Lines of JSON between the supervisors of one job, once both ends have proved that they know the job's token.

Every message tells a whole state, and is sent again with every beat: one that is lost with its connection is no harm.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import random
import socket
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

LONGEST_LINE = 1 << 20
LONGEST_PROOF = 1024
PROOF_S = 10.0
_CHUNK = 1 << 16


class Link:
    """One connection. `peer` is the index of the host at its other end, from when that is proved on.

    heard: when the last byte came, by the monotonic clock.
    """

    def __init__(self, connected: socket.socket, token: bytes, own: int, expected: int | None = None) -> None:
        self.socket = connected
        self.peer: int | None = None
        self.closed = False
        self.greeted = False  # for its owner: whether the other end has been told anything
        self.heard = self.opened = time.monotonic()
        self._token = token
        self._own = own
        self._expected = expected  # whom this end called; None: it was called
        self._connecting = expected is not None
        self._nonce, self._other = os.urandom(16).hex(), ""
        self._read = b""
        self._unsent = b""
        self._held = b""  # until the proof
        connected.setblocking(False)
        if expected is None:
            self._write({"nonce": self._nonce})

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return self._connecting or bool(self._unsent)

    def send(self, message: Message) -> None:
        """Sends as soon as the other end has proved itself."""
        if self.peer is None:
            self._held += _line(message)
        else:
            self._write(message)

    def flush(self) -> None:
        if self._connecting:
            if self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
                return self.close()
            self._connecting = False
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno != errno.ENOTCONN:
                self.close()
        return None

    def receive(self) -> list[Message]:
        """The messages that have come. A link that has ended, or whose other end lacks the token, is closed."""
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            return []
        self._read += data
        if len(self._read) > (LONGEST_PROOF if self.peer is None else LONGEST_LINE):
            self.close()
            return []
        messages = []
        while b"\n" in self._read and not self.closed:
            line, _, self._read = self._read.partition(b"\n")
            try:
                message = json.loads(line)
                if self.peer is None:
                    self._prove(message)
                else:
                    messages.append(message)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.close()
        if self.peer is not None:
            self.heard = time.monotonic()
        return messages

    def close(self) -> None:
        self.closed = True
        self.socket.close()

    def _prove(self, message: Message) -> None:
        if self._expected is not None and "proof" not in message:
            self._other = str(message["nonce"])
            self._write({"nonce": self._nonce, "from": self._own, "proof": self._proof("calls", self._own)})
            return
        if self._expected is not None:
            self._check(message["proof"], "called", self._expected)
            self.peer = self._expected
        else:
            caller = int(message["from"])
            self._other = str(message["nonce"])
            self._check(message["proof"], "calls", caller)
            self.peer = caller
            self._write({"proof": self._proof("called", self._own)})
        self._unsent += self._held
        self._held = b""
        self.flush()

    def _proof(self, who: str, index: int) -> str:
        mine, other = self._nonce, self._other
        nonces = mine + other if self._expected is not None else other + mine
        return hmac.new(self._token, f"{who} {index} {nonces}".encode(), hashlib.sha256).hexdigest()

    def _check(self, proof: object, who: str, index: int) -> None:
        if not hmac.compare_digest(str(proof).encode(), self._proof(who, index).encode()):
            raise ValueError

    def _write(self, message: Message) -> None:
        self._unsent += _line(message)
        if not self._connecting:
            self.flush()


def call(address: str, port: int, token: bytes, own: int, peer: int) -> Link | None:
    """A link that is being made to the supervisor of host `peer`; None when that cannot even begin."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        caller = socket.socket(family, kind, protocol)
    except OSError:
        return None
    caller.setblocking(False)
    if caller.connect_ex(where) not in (0, errno.EINPROGRESS):
        caller.close()
        return None
    return Link(caller, token, own, peer)


def listen(port: int) -> socket.socket:
    """Takes calls on all addresses of this host, of IPv6 too where there is such a thing."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    server = socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=both)
    server.setblocking(False)
    return server


def free_port(wanted: int | None, first: int, last: int) -> int:
    """`wanted` if nobody has it on this host, else any from `first` to `last` that is free, by chance, so that two jobs
    do not both take the same; 0 when none is."""
    others = list(range(first, last + 1))
    random.shuffle(others)
    for port in others if wanted is None else [wanted, *others]:
        with contextlib.suppress(OSError), listen(port):
            return port
    return 0


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
