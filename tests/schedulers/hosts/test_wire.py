"""What supervisors accept from each other's connections: relayed proofs, changed messages and silent strangers."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from schedulers.hosts.supervisor import wire
from schedulers.hosts.supervisor.wire import Calls, Link, Party
from schedulers.node.listen import listen
from tests.waiting import until

TOKEN = b"x" * 32
Change = Callable[[bytes], bytes]


class Relay:
    """A man in the middle: lines from the caller to the called end and back, each as `change` returns it."""

    def __init__(self, caller: Party, called: Party, *, expected: int | None = None) -> None:
        self.ours = [socket.socketpair() for _ in range(2)]
        for pair in self.ours:
            pair[0].setblocking(False)
        expected = called.index if expected is None else expected
        self.links = (Link(self.ours[0][1], caller, expected), Link(self.ours[1][1], called))
        self.links[0].flush()  # it is connected

    def pump(self, change: tuple[Change, Change] = (bytes, bytes)) -> list[list[dict[str, object]]]:
        """Passes on what there is until nobody says anything more; what each end then took for messages."""
        found: list[list[dict[str, object]]] = [[], []]
        moved = True
        while moved:
            moved = False
            for end in (0, 1):
                data = _read(self.ours[end][0])
                moved = moved or bool(data)
                if data and not self.links[1 - end].closed:
                    self.ours[1 - end][0].sendall(change[end](data))
                    found[1 - end] += self.links[1 - end].receive()
        return found

    def close(self) -> None:
        for link, pair in zip(self.links, self.ours, strict=True):
            link.close()
            pair[0].close()


def _read(end: socket.socket) -> bytes:
    data = b""
    try:
        while piece := end.recv(1 << 16):
            data += piece
    except BlockingIOError:
        pass
    return data


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    with ExitStack() as stack:
        yield lambda *args, **given: stack.enter_context(closing(Relay(*args, **given)))


def test_two_ends_that_know_the_token_hear_each_other(relay: Callable[..., Relay]) -> None:
    middle = relay(Party("j", TOKEN, 0), Party("j", TOKEN, 3))
    for number, link in enumerate(middle.links):
        link.send({"held": number})
    assert middle.pump() == [[{"held": 1}], [{"held": 0}]]
    for number, link in enumerate(middle.links):
        link.send({"text": "ü\n", "from": number})
        link.send({"n": number})
    assert middle.pump() == [[{"text": "ü\n", "from": 1}, {"n": 1}], [{"text": "ü\n", "from": 0}, {"n": 0}]]
    assert [link.peer for link in middle.links] == [3, 0]


@pytest.mark.parametrize(
    ("caller", "called", "expected"),
    [
        (Party("j", TOKEN, 0), Party("j", TOKEN, 2), 1),  # relayed to a host that was not called
        (Party("j", TOKEN, 0), Party("other", TOKEN, 1), 1),  # to the same host's supervisor of another job
        (Party("j", TOKEN, 0), Party("j", b"y" * 32, 1), 1),
        (Party("j", b"y" * 32, 0), Party("j", TOKEN, 1), 1),
    ],
)
def test_a_proof_holds_for_one_job_between_two_hosts_only(
    relay: Callable[..., Relay], caller: Party, called: Party, expected: int
) -> None:
    middle = relay(caller, called, expected=expected)
    for link in middle.links:
        link.send({"secret": True})
    assert middle.pump() == [[], []]
    assert [link.peer for link in middle.links] == [None, None]
    assert middle.links[1].closed


def test_who_calls_cannot_pass_for_another_host(relay: Callable[..., Relay]) -> None:
    middle = relay(Party("j", TOKEN, 0), Party("j", TOKEN, 1))
    assert middle.pump((lambda data: data.replace(b'"from": 0', b'"from": 2'), bytes)) == [[], []]
    assert middle.links[1].closed
    assert middle.links[1].peer is None


def test_a_proof_is_no_answer_to_itself() -> None:
    """Who is called by two ends and gives each what the other says proves nothing to them."""
    pairs = [socket.socketpair() for _ in range(2)]
    callers = [Link(pair[1], Party("j", TOKEN, own), 1 - own) for own, pair in enumerate(pairs)]
    for link, pair in zip(callers, pairs, strict=True):
        link.flush()
        pair[0].setblocking(False)
        pair[0].sendall(b'{"nonce": "00"}\n')
        link.receive()
    said = [_read(pair[0]) for pair in pairs]
    for pair, link, other in zip(pairs, callers, reversed(said), strict=True):
        pair[0].sendall(other)
        link.receive()
        assert link.closed
        assert link.peer is None
        pair[0].close()


def _lines(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


CHANGES: dict[str, tuple[Change, int]] = {
    "flipped": (lambda data: data.replace(b"1}", b"2}"), 0),
    "repeated": (lambda data: _lines(data)[0] * 2 + data, 1),
    "reordered": (lambda data: b"".join(reversed(_lines(data))), 0),
    "left out": (lambda data: b"".join(_lines(data)[1:]), 0),
    "without its MAC": (lambda data: data.partition(b" ")[2], 0),
    "with another MAC": (lambda data: b"0" * 64 + data[64:], 0),
    "in clear before": (lambda data: b'{"cancel": true}\n' + data, 0),
}


@pytest.mark.parametrize("end", [0, 1])
@pytest.mark.parametrize("how", CHANGES)
def test_a_message_that_was_touched_ends_the_connection(relay: Callable[..., Relay], how: str, end: int) -> None:
    middle = relay(Party("j", TOKEN, 0), Party("j", TOKEN, 1))
    middle.pump()
    change, good = CHANGES[how]
    for number in (1, 2, 3):
        middle.links[end].send({"n": number})
    found = middle.pump((change, bytes) if end == 0 else (bytes, change))[1 - end]
    assert found == [{"n": 1}][:good]
    assert middle.links[1 - end].closed


def test_what_one_end_said_is_not_taken_for_the_others(relay: Callable[..., Relay]) -> None:
    middle = relay(Party("j", TOKEN, 0), Party("j", TOKEN, 1))
    middle.pump()
    middle.links[0].send({"n": 1})
    middle.ours[0][0].sendall(_read(middle.ours[0][0]))
    assert middle.links[0].receive() == []
    assert middle.links[0].closed


def test_messages_of_one_connection_are_refused_by_the_next(relay: Callable[..., Relay]) -> None:
    first, second = (relay(Party("j", TOKEN, 0), Party("j", TOKEN, 1)) for _ in range(2))
    for middle in (first, second):
        middle.pump()
    first.links[0].send({"n": 1})
    second.ours[1][0].sendall(_read(first.ours[0][0]))
    assert second.links[1].receive() == []
    assert second.links[1].closed


@pytest.fixture
def calls() -> Iterator[tuple[Calls, int]]:
    with listen(0) as server:
        found = Calls(server, Party("j", TOKEN, 0), max_unverified=10)
        yield found, int(server.getsockname()[1])
        for link in found.links:
            link.close()


def test_silent_connections_do_not_keep_a_host_out(calls: tuple[Calls, int]) -> None:
    here, port = calls
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
        for _ in range(5):
            here.accept()
        link = wire.call("127.0.0.1", port, Party("j", TOKEN, 7), 0)
        assert link is not None
        stack.callback(link.close)
        link.send({"here": True})
        heard: list[dict[str, object]] = []

        def comes() -> bool:
            for writable in select.select([], [link], [], 0)[1]:
                writable.flush()
            link.receive()
            here.accept()
            silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
            for each in here.links:
                if not each.closed:
                    heard.extend(each.receive())
            return bool(heard)

        until(comes, "the host is heard")
        assert heard == [{"here": True}]
        here.drop_dead(0.0, 60.0)
        assert sum(each.peer is None for each in here.links) <= 10
        assert [each.peer for each in here.links if each.peer is not None] == [7]


def test_strangers_are_counted_by_address(calls: tuple[Calls, int]) -> None:
    """Those of one address crowd out each other, and nobody of another; the oldest goes."""
    here, port = calls
    with ExitStack() as stack:
        for source in ("127.0.0.2", "127.0.0.3", *["127.0.0.4"] * 30):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), source_address=(source, 0)))
        for _ in range(4):
            here.accept()
        here.drop_dead(0.0, 60.0)
        left = [link.origin for link in here.links]
        assert left == [b"127.0.0.2", b"127.0.0.3", *[b"127.0.0.4"] * 8]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("fd00:1:2:3::1", "fd00:1:2:3:4::1", True),
        ("fd00:1:2:3::1", "fd00:1:2:4::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    assert (wire.origin(one) == wire.origin(other)) is same
