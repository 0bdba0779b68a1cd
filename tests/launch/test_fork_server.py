"""What launcher and fork server say to each other: neither waits for the other, however much there is to say."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading

import pytest

from accel.launch.fork_server import ForkServer, ServerGone, _Server
from accel.launch.worker import Program

MANY = 2000  # some 500 fill both directions of a socket


def _tells_of_each(sock: socket.socket) -> None:
    """As the server does, which hears nothing while it tells."""
    with sock, sock.makefile("rb") as lines:
        for line in lines:
            sock.sendall(
                json.dumps({"event": "started", "local_rank": json.loads(line)["local_rank"]}).encode() + b"\n"
            )


def test_events_are_heard_while_messages_are_sent() -> None:
    ours, theirs = socket.socketpair()
    server = ForkServer(ours, os.getpid())

    def start_all() -> None:
        for rank in range(MANY):
            server.start_rank(rank, {}, None, spawn=False)

    for target, args in ((_tells_of_each, (theirs,)), (start_all, ())):
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
    thread.join(60)
    assert not thread.is_alive()
    heard = server.events(60)
    while len(heard) < MANY:
        heard += server.events(60)
    assert [event["local_rank"] for event in heard] == list(range(MANY))
    ours.close()


def test_a_server_that_has_gone_takes_no_message() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ServerGone):
        ForkServer(ours, os.getpid()).start_rank(0, {}, None, spawn=False)


def test_nothing_is_started_for_a_launcher_that_has_gone_or_ends_the_gang() -> None:
    start = {"do": "start", "local_rank": 3, "env": {}, "log": os.devnull, "spawn": False}
    for gone in (True, False):
        ours, theirs = socket.socketpair()
        server = _Server(theirs, Program(argv=["true"], entry="command"), None, 1.0)
        with ours, theirs:
            if gone:
                ours.close()
                server._send_event(event="exited")
            else:
                server._begin_end(signal.SIGTERM, 60)
            server._start(start)
            assert server._ranks == {}
            if not gone:
                told = json.loads(ours.recv(4096))
                assert (told["local_rank"], told["pid"], told["code"]) == (3, 0, -signal.SIGTERM)
        for descriptor in (server._wake_read, server._wake_write):
            os.close(descriptor)
