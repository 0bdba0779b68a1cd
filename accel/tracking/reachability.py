"""Whether a tracker's server can be reached at all: asked first, for some packages try for minutes or for ever."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

TIMEOUT_S = 10.0
_PORTS = {"http": 80, "https": 443}


def reach(url: str, timeout: float = TIMEOUT_S) -> None:
    """Connect to the host and port of an http(s) ``url``, and hang up.

    Does nothing for other addresses, and where a proxy stands between. Raises `ConnectionError` where the name does not
    resolve, the connection is refused, or nothing answers within ``timeout`` seconds.
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
