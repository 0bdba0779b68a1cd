"""Limits of every request: the size of its body, its `Host`, failed log-ins. Each request gets an id."""

from __future__ import annotations

import collections
import math
import os
import threading
import time
from collections.abc import Sequence

from prometheus_client import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import Problem, problem_response
from .settings import size_text

_MAX_FAILURES, _WINDOW_S = 10, 60.0


class Limits:
    """ASGI middleware that refuses foreign hosts and large bodies, and adds the headers of every answer."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], max_body: int, requests: Counter) -> None:
        self._app, self._hosts, self._max_body, self._requests = app, frozenset(hosts), max_body, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = os.urandom(8).hex()
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer["X-Request-Id"] = request_id
                answer["X-Content-Type-Options"] = "nosniff"
                answer.setdefault("Cache-Control", "no-store")
                endpoint = getattr(scope.get("endpoint"), "__name__", "none")
                self._requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        host = Headers(scope=scope).get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() not in self._hosts:
            refusal = f"this server does not answer for {name or 'no'} host: use the URL that it was started with"
            await problem_response(400, refusal)(scope, receive, send_with_headers)
            return
        await self._app(scope, _counted(receive, self._max_body), send_with_headers)


def _counted(receive: Receive, max_body: int) -> Receive:
    count = 0

    async def receive_counted() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > max_body:
            raise Problem(413, f"the body has more than {size_text(max_body)}")
        return message

    return receive_counted


class Failures:
    """The failed log-ins of each address within the current minute. Thread-safe."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._ends_at = 0.0
        self._lock = threading.Lock()

    def add(self, address: str) -> None:
        """Count a failed log-in. Raises Problem if the address has failed too often already."""
        now = time.monotonic()
        with self._lock:
            if now >= self._ends_at:
                self._counts.clear()
                self._ends_at = now + _WINDOW_S
            self._counts[address] += 1
            if self._counts[address] > _MAX_FAILURES:
                wait_s = math.ceil(self._ends_at - now)
                raise Problem(429, f"too many failed log-ins from {address}", headers={"Retry-After": str(wait_s)})
