"""Servers on all addresses of a machine, with and without IPv6 in its kernel."""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

import pytest

from schedulers.hosts.supervisor import wire
from schedulers.node import jobs, probe
from schedulers.node.listen import listen
from schedulers.slurm.batch import slurm
from tests.ports import free_port


@pytest.fixture
def no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `ipv6.disable=1`: Python is built with IPv6, and the system refuses such a socket."""
    new = socket.socket

    def refusing(family: int = socket.AF_INET, *rest: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return new(family, *rest, **named)

    monkeypatch.setattr(socket, "socket", refusing)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_server_has_all_addresses(address: str) -> None:
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("the kernel has no IPv6")
    with listen(0) as server, socket.create_connection((address, server.getsockname()[1]), timeout=20):
        server.accept()[0].close()


def test_a_port_in_use(no_ipv6: None) -> None:
    with listen(0) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match="already in use"):
            listen(taken)
        assert jobs.port("", {"ports": [taken]}, []) is None


def test_a_kernel_without_ipv6(no_ipv6: None) -> None:
    with listen(0) as server:
        assert server.family == socket.AF_INET
    port, held = slurm.hold_port(4712)
    with held:
        assert (held.family, held.getsockname()[1]) == (socket.AF_INET, port)
    free = free_port()
    assert wire.free_port(free, free, free) == free
    assert jobs.port("", {"ports": [free]}, []) == free
    reply = probe.listen_on_first({"ports": [0], "token": "a token"})
    with socket.create_connection(("127.0.0.1", reply["port"]), timeout=20) as client:
        assert client.recv(100) == b"a token"
