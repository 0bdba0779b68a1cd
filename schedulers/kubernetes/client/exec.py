"""Programs in a running container, over the official client's WebSocket."""

from __future__ import annotations

from typing import Any

from .errors import error_of, unreachable
from .kubeconfig import Access


def connect(
    configuration: Any, access: Access, shown: list[tuple[str, str]], url: str, where: str, *, binary: bool
) -> Any:
    """Return the client's WSClient. `shown`: the authentication headers. Raises ApiError, Unreachable, ConfigError."""
    import websocket
    from kubernetes.stream import ws_client

    # It passes these two headers on and no others: those of impersonation follow in lines of their own.
    protocols = f"{ws_client.V5_CHANNEL_PROTOCOL},{ws_client.V4_CHANNEL_PROTOCOL}"
    more = "".join(f"\r\n{name}: {value}" for name, value in shown if name != "authorization")
    headers = {**dict(shown), "sec-websocket-protocol": protocols + more}
    opened: Any = ws_client.WSClient
    try:
        return opened(configuration, "ws" + url.removeprefix("http"), headers, capture_all=False, binary=binary)
    except websocket.WebSocketBadStatusException as error:
        body = error.resp_body or b""
        raise error_of(error.status_code, bytes(body), where=where, who=access.who) from None
    except (websocket.WebSocketException, OSError) as error:
        raise unreachable(error, where, access.shown, configuration.proxy) from None


def hang_up(client: Any) -> None:
    """Shut the connection down without a closing handshake. Raises OSError, WebSocketException.

    The handshake would block, and leaves the socket open if the server is gone first.
    """
    client.sock.shutdown()
