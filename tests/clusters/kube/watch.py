"""How the programs of a Kubernetes cluster of the tests know it: by requests, and by lists that a watch keeps."""

from __future__ import annotations

import asyncio
import calendar
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from .client import MERGE, Object, Refused

_AGAIN_S = 0.2
_NOT_THERE_S = 1.0  # a kind that nobody has installed
_LARGEST_LINE = 2**24


@dataclass(frozen=True)
class Access:
    """Who one is, for a program of the cluster: three files in a directory, and where the server is."""

    server: str
    directory: Path
    user: str

    def context(self, purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH) -> ssl.SSLContext:
        made = ssl.create_default_context(purpose, cafile=str(self.directory / "ca.crt"))
        made.load_cert_chain(self.directory / f"{self.user}.crt", self.directory / f"{self.user}.key")
        return made


class Connection:
    """One user at one server; for one event loop. To be closed."""

    def __init__(self, access: Access) -> None:
        connector = aiohttp.TCPConnector(ssl=access.context(), limit=64)
        self._session = aiohttp.ClientSession(access.server, connector=connector)

    async def call(
        self, method: str, path: str, body: object = None, *, query: Mapping[str, str] | None = None
    ) -> Object:
        """The answer. Raises Refused; waits, as long as it takes, for a server that is away."""
        kind = MERGE if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        while True:
            try:
                sent = self._session.request(method, path, data=data, params=query, headers={"Content-Type": kind})
                async with sent as answer:
                    told = await answer.json(content_type=None)
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError):
                await asyncio.sleep(_AGAIN_S)
                continue
            if answer.status in (429, 500, 503, 504) and method != "POST":
                await asyncio.sleep(_AGAIN_S)
                continue
            if answer.status >= 400:
                raise Refused(answer.status, str(told.get("reason", "")), str(told.get("message", "")))
            assert isinstance(told, dict)
            return told

    async def patch_status(self, path: str, status: Object) -> bool:
        """False when there is no such object any more."""
        try:
            await self.call("PATCH", f"{path}/status", {"status": status})
        except Refused as error:
            if error.status not in (404, 409, 422):
                raise
            if error.status == 422:
                print(f"{path}: {error}", file=sys.stderr, flush=True)
            return False
        return True

    async def watch(self, path: str, version: str) -> aiohttp.ClientResponse:
        query = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        return await self._session.get(
            path, params=query, timeout=timeout, max_line_size=_LARGEST_LINE, read_bufsize=_LARGEST_LINE
        )

    async def close(self) -> None:
        await self._session.close()


class Listing:
    """All objects of one kind, as the server had them a moment ago. `changed` is told of each that is another now."""

    def __init__(self, connection: Connection, path: str, changed: Callable[[str, Object], None]) -> None:
        self.path = path
        self.objects: dict[str, Object] = {}  # by uid
        self.listed = asyncio.Event()
        self._connection = connection
        self._changed = changed

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self.objects.values()))

    async def run(self) -> None:
        """Until it is cancelled; a server that is away is waited for, and a kind that is not there too."""
        while True:
            try:
                version = await self._list()
                self.listed.set()
                await self._follow(version)
            except Refused as error:
                if error.status == 404:
                    await asyncio.sleep(_NOT_THERE_S)
                elif error.status != 410:
                    print(f"{self.path}: {error}", file=sys.stderr, flush=True)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
                pass
            await asyncio.sleep(_AGAIN_S)

    async def _list(self) -> str:
        told = await self._connection.call("GET", self.path)
        # The items of a list do not say what they are.
        kind = {"apiVersion": told["apiVersion"], "kind": str(told["kind"]).removesuffix("List")}
        fresh = {item["metadata"]["uid"]: {**kind, **item} for item in told["items"] or []}
        for uid in [uid for uid in self.objects if uid not in fresh]:
            self._changed("DELETED", self.objects.pop(uid))
        for uid, item in fresh.items():
            known = self.objects.get(uid)
            self.objects[uid] = item
            if known is None or known["metadata"]["resourceVersion"] != item["metadata"]["resourceVersion"]:
                self._changed("ADDED" if known is None else "MODIFIED", item)
        return str(told["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> None:
        answer = await self._connection.watch(self.path, version)
        async with answer:
            if answer.status != 200:
                return
            async for line in answer.content:
                event = json.loads(line)
                kind, item = event["type"], event["object"]
                if kind == "ERROR":
                    return
                if kind == "BOOKMARK":
                    continue
                uid = item["metadata"]["uid"]
                if kind == "DELETED":
                    self.objects.pop(uid, None)
                else:
                    self.objects[uid] = item
                self._changed(kind, item)


class Events:
    """Tells the cluster what happened to an object, as its components do; never fails for it."""

    def __init__(self, connection: Connection, component: str) -> None:
        self._connection = connection
        self._component = component
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, about: Object, reason: str, message: str, *, warning: bool = False) -> None:
        task = asyncio.create_task(self._send(about, reason, message, "Warning" if warning else "Normal"))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, about: Object, reason: str, message: str, kind: str) -> None:
        metadata, now = about["metadata"], stamp()
        place = metadata.get("namespace") or "default"
        involved = {"kind": about["kind"], "apiVersion": about["apiVersion"], "name": metadata["name"]}
        involved |= {"namespace": metadata.get("namespace", ""), "uid": metadata["uid"]}
        body = {
            "metadata": {"name": f"{metadata['name']}.{time.time_ns():x}", "namespace": place},
            "involvedObject": involved, "reason": reason, "message": message, "type": kind, "count": 1,
            "firstTimestamp": now, "lastTimestamp": now, "source": {"component": self._component},
        }  # fmt: skip
        try:
            await self._connection.call("POST", f"/api/v1/namespaces/{place}/events", body)
        except Refused as error:
            if error.status not in (403, 404):  # a namespace that is being ended takes none
                print(f"event {reason} of {metadata['name']}: {error}", file=sys.stderr, flush=True)


def stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def seconds(text: str) -> float:
    """Since 1970, of a time as the server writes it."""
    return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
