"""The part of the Kubernetes API that the charts' scripts use, over objects in memory and the rules of a Role.

A stand-in for the server, not for the scripts: lists by pages and selectors, deletions with preconditions, access
reviews by what a Role says, and which kinds there are.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

Object = dict[str, Any]
TOKEN = "the-token"

_LIST = re.compile(
    r"(?P<group>/api/v1|/apis/[^/]+/[^/]+)/namespaces/(?P<ns>[^/]+)/(?P<kind>[a-z]+)(/(?P<name>[^/]+))?\Z"
)


class ApiServer:
    """Holds `objects`, by path of their list; answers at `address`.

    kinds: path of a group -> plurals that it has.
    """

    def __init__(self, kinds: Mapping[str, list[str]], rules: list[Object] | None = None) -> None:
        self.kinds = dict(kinds)
        self.rules = rules or []
        self.objects: dict[str, list[Object]] = {}
        self.deleted: list[str] = []
        self.before_delete: Callable[[str], object] = lambda path: None
        self.address = ""

    def add(self, path: str, name: str, **metadata: Any) -> Object:
        """Puts an object there, and returns it."""
        made: Object = {
            "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": "1", "labels": {}, **metadata}
        }
        self.objects.setdefault(path, []).append(made)
        return made

    def answer(self, method: str, url: str, body: Object | None) -> tuple[int, Object]:
        """(status, JSON) for a request."""
        parsed = urlparse(url)
        query = {key: values[0] for key, values in parse_qs(parsed.query).items()}
        if parsed.path.endswith("/selfsubjectaccessreviews") and body is not None:
            return 201, {"status": {"allowed": self._allows(body["spec"]["resourceAttributes"])}}
        if parsed.path in self.kinds:
            return 200, {"resources": [{"name": kind} for kind in self.kinds[parsed.path]]}
        found = _LIST.match(parsed.path)
        if found is None or found["kind"] not in self.kinds.get(found["group"], []):
            return 404, {"message": "the server could not find the requested resource"}
        attributes = {"group": found["group"].removeprefix("/api/v1").removeprefix("/apis/").partition("/")[0]}
        attributes |= {"resource": found["kind"], "verb": {"GET": "list", "DELETE": "delete"}[method]}
        if not self._allows({"subresource": "", "name": "", **attributes}):
            return 403, {"message": f"{found['kind']} is forbidden: cannot {attributes['verb']} resource"}
        if method == "GET":
            return 200, self._page(parsed.path, query)
        return self._delete(parsed.path.rpartition("/")[0], found["name"], body or {})

    def _allows(self, wanted: Mapping[str, str]) -> bool:
        resource = "/".join(filter(None, (wanted["resource"], wanted["subresource"])))
        return any(
            wanted["group"] in rule["apiGroups"]
            and resource in rule["resources"]
            and wanted["verb"] in rule["verbs"]
            and ("resourceNames" not in rule or wanted["name"] in rule["resourceNames"])
            for rule in self.rules
        )

    def _page(self, path: str, query: Mapping[str, str]) -> Object:
        matching = [o for o in self.objects.get(path, []) if query["labelSelector"] in o["metadata"]["labels"]]
        start, limit = int(query.get("continue", 0)), int(query["limit"])
        more = {"continue": str(start + limit)} if start + limit < len(matching) else {}
        return {"metadata": more, "items": matching[start : start + limit]}

    def _delete(self, path: str, name: str, options: Object) -> tuple[int, Object]:
        self.before_delete(f"{path}/{name}")
        for thing in self.objects.get(path, []):
            if thing["metadata"]["name"] == name:
                wanted = options.get("preconditions", {})
                if any(thing["metadata"][key] != value for key, value in wanted.items()):
                    return 409, {"message": "the object has been modified"}
                self.deleted.append(f"{path.rpartition('/')[2]}/{name}")
                return 200, {}
        return 404, {"message": "not found"}


@contextmanager
def serving(server: ApiServer) -> Iterator[str]:
    """Answers at the address that it gives until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if self.headers["Authorization"] == f"Bearer {TOKEN}":
                status, answer = server.answer(self.command, self.path, body)
            else:
                status, answer = 401, {"message": "Unauthorized"}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_DELETE = do  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()
            thread.join()
