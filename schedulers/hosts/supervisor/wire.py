"""Lines of JSON between the supervisors of one job, authenticated by the job's token.

Each proof names the job, both ends and both random numbers, so that a proof relayed to another host fails there. Each
message has a MAC over its content and its number, with a key for this connection and this direction: one that was
changed, repeated, reordered or left out ends the connection.

Every message is a complete state, sent again with every beat: one lost with its connection does no harm.
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

from ...node.listen import listen

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

LONGEST_LINE = 1 << 20
LONGEST_PROOF = 1024
PROOF_S = 10.0
_CHUNK = 1 << 16
_MAPPED = bytes(10) + b"\xff\xff"  # the first bytes of an IPv4 address in IPv6's form


class Party:
    """This end of every link: the host's index in the job, the job's id and its token."""

    def __init__(self, job: str, token: bytes, index: int) -> None:
        self.job, self.token, self.index = job, token, index

    def derived(self, purpose: str, caller: int, callee: int, nonces: tuple[str, str]) -> bytes:
        """Return a value that only holders of the token can compute, different for every link."""
        bound = json.dumps([purpose, self.job, caller, callee, *nonces])
        return hmac.new(self.token, bound.encode(), hashlib.sha256).digest()


class Link:
    """One connection. `peer`: the index of the host at its other end, None until it has proved that.

    last_byte_at: time (`time.monotonic`) of the last byte from a proven peer; at first, of the opening.
    origin: the value of `origin` for the caller's address.
    """

    def __init__(self, sock: socket.socket, party: Party, expected: int | None = None, origin: bytes = b"") -> None:
        """Start the handshake. `expected`: the host that this end called; None if this end was called."""
        self.socket = sock
        self.peer: int | None = None
        self.closed = False
        self.greeted = False  # set by its owner, once it has sent something
        self.last_byte_at = self.opened = time.monotonic()
        self.origin = origin
        self._party = party
        self._expected = expected
        self._connecting = expected is not None
        self._nonce = os.urandom(16).hex()
        self._read = b""
        self._unsent = b""
        self._held_messages: list[Message] = []  # until the proof
        self._proof_due = ""  # the proof that the called end must send
        self._keys = (b"", b"")  # for sending, and for receiving
        self._counts = [0, 0]
        sock.setblocking(False)
        if expected is None:
            self._write({"nonce": self._nonce})

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return self._connecting or bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, as soon as the other end has proved itself."""
        if self.peer is None:
            self._held_messages.append(message)
            return
        data = json.dumps(message).encode()
        self._put(self._mac(0, data) + b" " + data + b"\n")

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
        """Return the messages that have come. Closes a link that has ended, or carries a wrong proof or MAC."""
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
                if self.peer is None:
                    self._prove(json.loads(line))
                else:
                    messages.append(self._verified(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                self.close()
        if self.peer is not None:
            self.last_byte_at = time.monotonic()
        return messages

    def close(self) -> None:
        self.closed = True
        self.socket.close()

    def _prove(self, message: Message) -> None:
        """Continue the handshake: the called end's nonce, the caller's nonce and proof, the called end's proof."""
        if self._expected is None:
            caller = int(message["from"])
            proof, reply_proof = self._derive(caller, self._party.index, (str(message["nonce"]), self._nonce))
            _compare(message["proof"], proof)
            self._write({"proof": reply_proof})
            self._admit(caller)
        elif not self._proof_due:
            nonces = (self._nonce, str(message["nonce"]))
            proof, self._proof_due = self._derive(self._party.index, self._expected, nonces)
            self._write({"nonce": self._nonce, "from": self._party.index, "proof": proof})
        else:
            _compare(message["proof"], self._proof_due)
            self._admit(self._expected)

    def _derive(self, caller: int, callee: int, nonces: tuple[str, str]) -> tuple[str, str]:
        """Return the proofs of the caller and of the called end; store the keys that belong to them."""
        keys = [self._party.derived(f"{role} key", caller, callee, nonces) for role in ("caller", "called")]
        self._keys = (keys[0], keys[1]) if self._expected is not None else (keys[1], keys[0])
        proofs = [self._party.derived(f"{role} proof", caller, callee, nonces).hex() for role in ("caller", "called")]
        return proofs[0], proofs[1]

    def _admit(self, peer: int) -> None:
        self.peer = peer
        queued, self._held_messages = self._held_messages, []
        for message in queued:
            self.send(message)

    def _mac(self, direction: int, data: bytes) -> bytes:
        """Return the MAC of the next message that is sent (direction 0) or received (1)."""
        count, self._counts[direction] = self._counts[direction], self._counts[direction] + 1
        return hmac.new(self._keys[direction], count.to_bytes(8, "big") + data, hashlib.sha256).hexdigest().encode()

    def _verified(self, line: bytes) -> Message:
        mac, _, data = line.partition(b" ")
        if not hmac.compare_digest(mac, self._mac(1, data)):
            raise ValueError
        message: Message = json.loads(data)
        return message

    def _write(self, message: Message) -> None:
        self._put(json.dumps(message).encode() + b"\n")

    def _put(self, data: bytes) -> None:
        self._unsent += data
        if not self._connecting:
            self.flush()


class Calls:
    """The links of callers, with a limit on unverified ones: callers that have yet to prove who they are.

    Above `max_unverified`, the oldest of the origin with the most is closed: silent connections displace each other,
    and a host that calls has the time of a handshake.
    """

    def __init__(self, server: socket.socket | None, party: Party, max_unverified: int) -> None:
        self._server = server
        if server is not None:
            server.setblocking(False)
        self._party = party
        self._max_unverified = max_unverified
        self.links: list[Link] = []

    def accept(self) -> bool:
        """Accept all waiting calls: as a job starts, its hosts call at once. Return False if no descriptor is free."""
        assert self._server is not None  # else nobody calls
        has_room = True
        for _ in range(self._max_unverified):
            try:
                sock, address = self._server.accept()
            except OSError as error:
                has_room = error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
                break
            self.links.append(Link(sock, self._party, origin=origin(str(address[0]))))
        unverified_links: dict[bytes, list[Link]] = {}
        for link in self.links:
            if link.peer is None and not link.closed:
                unverified_links.setdefault(link.origin, []).append(link)
        for _ in range(sum(map(len, unverified_links.values())) - self._max_unverified):
            max(unverified_links.values(), key=len).pop(0).close()
        return has_room

    def drop_dead(self, now: float, silence_s: float) -> None:
        for link in self.links:
            if not link.closed and now - link.last_byte_at > (PROOF_S if link.peer is None else silence_s):
                link.close()
        self.links = [link for link in self.links if not link.closed]


def origin(address: str) -> bytes:
    """Return what one machine has few of: its IPv4 address, or its IPv6 network of 64 bits."""
    try:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except OSError:
        return address.encode()
    return socket.inet_ntoa(packed[12:]).encode() if packed.startswith(_MAPPED) else packed[:8]


def _compare(proof: object, expected: str) -> None:
    if not hmac.compare_digest(str(proof).encode(), expected.encode()):
        raise ValueError


def call(address: str, port: int, party: Party, peer: int) -> Link | None:
    """Start to connect to the supervisor of host `peer`; return the link, None if that fails at once."""
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        caller = socket.socket(family, kind, protocol)
    except OSError:
        return None
    caller.setblocking(False)
    if caller.connect_ex(sockaddr) not in (0, errno.EINPROGRESS):
        caller.close()
        return None
    return Link(caller, party, peer)


def free_port(preferred: int | None, first: int, last: int) -> int:
    """Return `preferred` if it is free here, else a random free port from `first` to `last`, or 0 if none is free."""
    candidates = list(range(first, last + 1))
    random.shuffle(candidates)
    for port in candidates if preferred is None else [preferred, *candidates]:
        with contextlib.suppress(OSError), listen(port):
            return port
    return 0
