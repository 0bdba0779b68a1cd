"""The Kubernetes API over the standard library, so that any image with Python can be used."""

from __future__ import annotations

import argparse
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 60
PAGE = 200


class ApiError(Exception):
    """The API server refused a request, or could not be asked (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """One API server, asked with a service account's token, which is read each time: it may be replaced meanwhile."""

    def __init__(self, server: str, account: Path) -> None:
        self._server = server
        self._token = account / "token"
        authority = account / "ca.crt"
        self._tls = ssl.create_default_context(cafile=str(authority)) if server.startswith("https:") else None

    def ask(self, method: str, path: str, body: object = None, **query: str | int) -> Any:
        """The answer's JSON. Raises ApiError."""
        url = f"{self._server}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        request = urllib.request.Request(url, method=method, data=None if body is None else json.dumps(body).encode())
        request.add_header("Authorization", f"Bearer {self._token.read_text().strip()}")
        request.add_header("Accept", "application/json")
        if body is not None:
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._tls) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ApiError(error.code, f"{method} {path}: {_message(error)}") from None
        except OSError as error:
            raise ApiError(0, f"{method} {path}: {error}") from None

    def each(self, path: str, **query: str | int) -> Iterator[dict[str, Any]]:
        """Every object of a list, page by page. Raises ApiError."""
        more = ""
        while True:
            page = self.ask("GET", path, limit=PAGE, **query, **({"continue": more} if more else {}))
            yield from page["items"]
            more = page["metadata"].get("continue") or ""
            if not more:
                return


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser of what every script here takes; the defaults are those of a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--server", default=f"https://{host}:{port}", help="the API server's address")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="the directory with token and ca.crt")
    parser.add_argument("--namespace", required=True)
    return parser
