"""A program in a container that runs, over a websocket, which the official package speaks.

It wants files where a kubeconfig may hold the data itself.
"""

from __future__ import annotations

import tempfile
from typing import Any
from urllib.parse import unquote, urlsplit

from . import tls
from .credentials import Credentials, data_of, missing
from .errors import error_of
from .kubeconfig import Access


def connect(access: Access, credentials: Credentials, url: str, where: str, *, binary: bool) -> Any:
    """The package's WSClient. Raises ApiError, Unreachable, ConfigError."""
    try:
        import websocket
        from kubernetes.client.configuration import Configuration
        from kubernetes.stream import ws_client
    except ImportError:
        raise missing(where) from None
    headers = {}
    authorization = credentials.authorization()
    if authorization:
        headers["authorization"] = authorization
    opened: Any = ws_client.WSClient
    with tempfile.TemporaryDirectory(prefix="accel-") as directory:
        made = _configured(Configuration(), access, credentials, directory, where)
        try:
            return opened(made, "ws" + url.removeprefix("http"), headers, capture_all=False, binary=binary)
        except websocket.WebSocketBadStatusException as error:
            body = error.resp_body or b""
            raise error_of(error.status_code, bytes(body), where=where, who=access.who) from None
        except (websocket.WebSocketException, OSError) as error:
            raise tls.unreachable(error, access, where) from None


def hang_up(client: Any) -> None:
    """Ends the connection itself: a farewell would be waited for, and leaves the socket open where the server is gone
    first. Raises OSError, WebSocketException."""
    client.sock.shutdown()


def _configured(made: Any, access: Access, credentials: Credentials, directory: str, where: str) -> Any:
    made.verify_ssl = not access.cluster.get("insecure-skip-tls-verify")
    authority = data_of(access.cluster, "certificate-authority", where)
    if authority is not None:
        made.ssl_ca_cert = f"{directory}/authority.pem"
        with open(made.ssl_ca_cert, "wb") as file:
            file.write(authority)
    certificate = credentials.certificate()
    if certificate is not None:
        made.cert_file, made.key_file = tls.write_files(directory, certificate)
    made.tls_server_name = access.cluster.get("tls-server-name")
    proxy = tls.proxy_of(access)
    made.proxy, made.proxy_headers = proxy, None
    if proxy is not None and urlsplit(proxy).username is not None:
        import urllib3

        parts = urlsplit(proxy)
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        made.proxy_headers = urllib3.make_headers(proxy_basic_auth=pair)
    return made
