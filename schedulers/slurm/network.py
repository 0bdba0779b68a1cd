"""The network interface over which a node reaches the others, if its own name does not resolve to it."""

from __future__ import annotations

import contextlib
import socket

from ..node import probe


def for_gloo(peer: str) -> str | None:
    """Return the interface over which this node reaches `peer`; None if gloo needs none or it is unknown.

    By default gloo listens on the address of the node's own name. No other node reaches that if the name has no
    address, or a line `127.0.1.1 NAME` in /etc/hosts, which Debian's installer writes.

    https://github.com/pytorch/pytorch/blob/main/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp
    (createDefaultDevice)
    """
    if any(not _is_loopback(address) for address in _addresses(socket.gethostname())):
        return None
    routes = {address: interface for interface, address in probe.ipv4() + probe.ipv6() if interface != "lo"}
    return next(
        (routes[local_address] for address in _addresses(peer) if (local_address := _own_towards(address)) in routes),
        None,
    )


def _addresses(name: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in infos]


def _is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _own_towards(address: str) -> str | None:
    """Return this machine's source address for packets to that address. Sends none."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))
        return str(sock.getsockname()[0]).removeprefix("::ffff:")
    return None
