"""Ports and kernel of this machine."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
import sys

from accel.errors import ArgumentError
from accel.world.environment import read_world

_PORT = 29500
_OLDEST_KERNEL = (5, 5, 0)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return True if a process on this machine listens on ``port`` (default: 29500)."""
    port = port_number(_PORT if port is None else port)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def get_free_port() -> int:
    """Return a port on which nothing listens at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def port_number(port: int | str) -> int:
    """Return ``port`` as a number. Raises `ArgumentError` unless it is from 0 to 65535."""
    text = str(port)
    if not (text.isascii() and text.isdigit() and int(text) <= 65535):
        raise ArgumentError(f"port {port!r} is not a number from 0 to 65535")
    return int(text)


def check_os_kernel() -> None:
    """Warn, on the main process, about a Linux older than 5.5, on which training processes were seen to hang."""
    if not sys.platform.startswith("linux"):
        return
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", platform.release())
    if match is None or tuple(int(number or 0) for number in match.groups()) >= _OLDEST_KERNEL:
        return
    if read_world(os.environ).rank == 0:
        logging.getLogger(__name__).warning("Linux %s is older than 5.5.0: processes may hang; update it", match[0])
