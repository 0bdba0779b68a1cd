"""Ports of this computer that are free, and stay so until the test listens there."""

from __future__ import annotations

import itertools
import os
import re
import socket

# Below those that the system gives to whoever connects (net.ipv4.ip_local_port_range, 32768 and up): of those, one that
# was free a moment ago may be the near end of any connection. Nor those that accel takes by itself, from 20000 on. Each
# worker of the tests has some of its own.
_FIRST, _OF_A_WORKER, _WORKERS = 11_000, 550, 16

_worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or _WORKERS - 1) % _WORKERS
_numbers = itertools.count(os.getpid())  # where two runs of the tests meet, each begins elsewhere


def free_port() -> int:
    """One on which nobody listens, on any address of this computer; another one each time."""
    for number in itertools.islice(_numbers, _OF_A_WORKER):
        port = _FIRST + _worker * _OF_A_WORKER + number % _OF_A_WORKER
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: not of one that has just ended
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port of {_OF_A_WORKER}")
