"""Maintenance and preemption notices from Google Cloud's metadata server.

https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and …/docs/instances/create-use-spot
"""

from __future__ import annotations

import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from urllib.request import OpenerDirector

_QUIET = {"maintenance-event": "NONE", "preempted": "FALSE"}
_WAIT_S, _ALLOWANCE_S, _RETRY_S = 60, 30.0, 5.0


class Announcements:
    """The notices for this host, received by threads that end with the process."""

    def __init__(self, server: str) -> None:
        from http.client import HTTPException
        from urllib import request  # slower to import than all else in a supervisor

        self._errors = (OSError, ValueError, HTTPException)

        self._new: list[str] = []
        opener = request.build_opener(request.ProxyHandler({}))  # the server is this machine's own
        opener.addheaders = [("Metadata-Flavor", "Google")]
        for key in _QUIET:
            url = f"http://{server}/computeMetadata/v1/instance/{key}"
            threading.Thread(target=self._poll_server, args=(opener, key, url), daemon=True).start()

    def take(self) -> str:
        """Return a notice that has come since the last call; empty if there is none."""
        return self._new.pop(0) if self._new else ""

    def _poll_server(self, opener: OpenerDirector, key: str, url: str) -> None:
        etag, previous = "0", _QUIET[key]
        while True:
            query = f"{url}?wait_for_change=true&timeout_sec={_WAIT_S}&last_etag={etag}"
            try:
                with opener.open(query, timeout=_WAIT_S + _ALLOWANCE_S) as response:
                    etag, event = response.headers.get("ETag", "0"), response.read().decode().strip()
            except self._errors:
                time.sleep(_RETRY_S)
                continue
            if event not in (previous, _QUIET[key]):
                self._new.append(f"{key}: {event}")
            previous = event
