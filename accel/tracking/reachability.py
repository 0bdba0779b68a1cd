"""A check that a tracker's server is reachable, since some packages retry for minutes or forever."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443}


def reach(url: str, timeout: float = TIMEOUT_S) -> None:
    """Connect to the host and port of an http(s) ``url``, and disconnect.

    Does nothing for other addresses and behind a proxy. Raises `ConnectionError` if the name does not resolve,
    the connection is refused, or nothing responds within ``timeout`` seconds.
    """
    parts = urlsplit(url)
    host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    if host is None or port is None or parts.scheme not in _PORTS or _proxied(parts.scheme, host):
        return
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError as error:
        raise ConnectionError(f"{host}:{port} cannot be reached: {error.strerror or error}") from error


def _proxied(scheme: str, host: str) -> bool:
    proxies = getproxies()
    return (scheme in proxies or "all" in proxies) and not proxy_bypass(host)
