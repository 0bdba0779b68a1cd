"""Connections to an API server: TLS, proxies, and how trouble with either is said."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from ...errors import ConfigError, Unreachable
from ...printable import without_password
from .credentials import Certificate, data_of, missing
from .kubeconfig import Access

if TYPE_CHECKING:
    import urllib3

CONNECT_S = 10.0
# A peer that is gone without a word is noticed after a minute or so, also by a stream on which nothing comes.
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


def tls_of(access: Access, certificate: Certificate | None, where: str) -> ssl.SSLContext:
    """What the connections are secured with. Raises ConfigError for certificates that cannot be read."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if access.cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        authority = data_of(access.cluster, "certificate-authority", where)
        try:
            if authority is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(cadata=authority.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError, ValueError):
            raise ConfigError(f"{where}: certificate-authority is no certificate (PEM)") from None
    if certificate is not None:
        _show(context, certificate, where)
    return context


def _show(context: ssl.SSLContext, certificate: Certificate, where: str) -> None:
    """The client's certificate, which Python takes from files only."""
    with tempfile.TemporaryDirectory(prefix="accel-") as directory:
        paths = write_files(directory, certificate)
        try:
            context.load_cert_chain(*paths, password=lambda: "")
        except (ssl.SSLError, OSError, ValueError):
            raise ConfigError(
                f"{where}: client-certificate and client-key do not belong together, or are no PEM"
            ) from None


def write_files(directory: str, certificate: Certificate) -> tuple[str, str]:
    """The certificate and its key as files for nobody else's eyes."""
    paths = os.path.join(directory, "certificate.pem"), os.path.join(directory, "key.pem")
    for path, data in zip(paths, certificate, strict=True):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
    return paths


def proxy_of(access: Access) -> str | None:
    """The proxy that the kubeconfig names, or else the environment (HTTPS_PROXY, but for what NO_PROXY lists)."""
    named = access.cluster.get("proxy-url")
    if named:
        return str(named)
    if not any(
        name.lower() in ("https_proxy", "http_proxy", "all_proxy") and value for name, value in os.environ.items()
    ):
        return None
    from requests.utils import get_environ_proxies

    found: Mapping[str, str] = get_environ_proxies(access.server)
    proxy = found.get(urlsplit(access.server).scheme) or found.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def pool_of(access: Access, certificate: Certificate | None, where: str) -> urllib3.PoolManager:
    """The connections, which are made when they are needed. Raises ConfigError."""
    try:
        import urllib3
        from urllib3.connection import HTTPConnection
    except ImportError:
        raise missing(where) from None
    alive = [(socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _KEEPALIVE if hasattr(socket, name)]
    options: dict[str, Any] = {
        "maxsize": 64,
        "retries": False,
        "socket_options": [
            *HTTPConnection.default_socket_options,
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            *alive,
        ],
    }
    if access.server.startswith("https://"):
        options["ssl_context"] = tls_of(access, certificate, where)
        if access.cluster.get("insecure-skip-tls-verify"):
            options["cert_reqs"] = "CERT_NONE"
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)  # the kubeconfig says it is meant
        name = access.cluster.get("tls-server-name")
        if name:
            options |= {"server_hostname": str(name), "assert_hostname": str(name)}
    proxy = proxy_of(access)
    if proxy is None:
        return urllib3.PoolManager(**options)
    return _proxied(proxy, options, where)


def _proxied(proxy: str, options: dict[str, Any], where: str) -> urllib3.PoolManager:
    import urllib3

    if proxy.startswith("socks"):
        try:
            from urllib3.contrib.socks import SOCKSProxyManager
        except ImportError:
            raise ConfigError(
                f"{where}: proxy-url {without_password(proxy)}: a SOCKS proxy needs pip install PySocks"
            ) from None
        return SOCKSProxyManager(proxy, **options)
    if not proxy.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: proxy-url must be like http://host:port, not {without_password(proxy)!r}")
    headers = None
    parts = urlsplit(proxy)
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers = urllib3.make_headers(proxy_basic_auth=pair)
    # A proxy's own certificate is judged by the system's authorities, and not by the cluster's.
    return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)


def unreachable(error: Exception, access: Access, where: str) -> Unreachable:
    """What went wrong on the way to the API server, or back, in a line."""
    proxy = proxy_of(access)
    way = f" through proxy {without_password(proxy)}" if proxy else ""
    return Unreachable(f"{where}: the API server {access.shown} cannot be reached{way}: {_why(error)}")


def _why(error: BaseException) -> str:
    """The innermost cause, which is the one that says something."""
    import urllib3.exceptions as kinds

    seen: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in seen:
        seen.append(at)
        around = None if at.__suppress_context__ else at.__context__
        inner = getattr(at, "reason", None) or getattr(at, "original_error", None) or at.__cause__ or around
        at = inner if isinstance(inner, BaseException) else None
    for each in seen:
        if isinstance(each, ssl.SSLCertVerificationError):
            return _untrusted(each)
        if isinstance(each, socket.gaierror):
            return f"its name is not known ({each.strerror})"
        slow = isinstance(each, (kinds.TimeoutError, TimeoutError)) and not isinstance(each, kinds.NewConnectionError)
        if slow:
            return "no answer in time"
        if isinstance(each, (kinds.ProtocolError, http.client.IncompleteRead, ConnectionResetError, BrokenPipeError)):
            return "the connection was cut off"
    told = [each for each in seen if isinstance(each, OSError) and each.strerror]
    text = (told[-1].strerror if told else None) or str(seen[-1]) or type(seen[-1]).__name__
    return " ".join(str(text).split()).lower() if told else " ".join(str(text).split())


def _untrusted(error: ssl.SSLCertVerificationError) -> str:
    why = error.verify_message.rstrip(".")
    advice = "certificate-authority in the kubeconfig is not the one that signed it, or is lacking"
    if "hostname" in why.lower() or "ip address" in why.lower():
        advice = "tls-server-name in the kubeconfig says another name"
    elif "expired" in why.lower():
        advice = "it must be renewed there"
    return f"its certificate is not trusted: {why} ({advice})"
