"""A TCP server on all addresses of this machine."""

from __future__ import annotations

import errno
import socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_BACKLOG = 4096


def listen(port: int) -> socket.socket:
    """Listen on the port (0: any free one), for IPv4 and, if the kernel has it, IPv6."""
    family = server_family()
    dual_stack = family == socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual_stack)


def listen_on_first(ports: Iterable[int]) -> socket.socket | None:
    """Listen on the first of the ports that is free and allowed; None if none is. Raises OSError for other problems."""
    for port in ports:
        try:
            return listen(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    return None


def server_family() -> socket.AddressFamily:
    """Return the address family of a server.

    `socket.has_ipv6` is about the interpreter: a kernel without IPv6 still refuses such a socket.
    """
    return socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
