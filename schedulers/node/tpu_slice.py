#!/usr/bin/env python3
"""The startup script of a slice that accel created: it deletes the slice when its job no longer needs it.

It runs as root on every worker. The first one acts; the others act a minute later, in case that one is lost.
The metadata `accel-slice` has the job, the timeouts, the URL for the result, and the URL to delete: the
slice's, or that of its queued resource. It needs Python 3.8 and nothing else.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import pwd
import time
import urllib.error
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

METADATA = "http://169.254.169.254/computeMetadata/v1/instance/"
LOOK_S = 2.0
RETRY_S = 15.0
REPLY_TIMEOUT_S = 60.0
KEEP_TRIES = 4


def main() -> None:
    number, settings = int(metadata("attributes/agent-worker-number")), json.loads(metadata("attributes/accel-slice"))
    log(wait_until_unneeded(settings))
    time.sleep(settings["others_s"] + number if number else 0)
    for _ in range(KEEP_TRIES):
        if upload_result(settings):
            break
        time.sleep(RETRY_S)
    while True:  # until there is no machine to run this on
        request("DELETE", settings["url"])
        time.sleep(RETRY_S)


def wait_until_unneeded(settings: dict[str, Any]) -> str:
    """Wait until the slice is to be deleted; return the reason. Uses no clock but this host's own."""
    last, changed, ended_at = None, time.monotonic(), None
    while True:
        now = time.monotonic()
        beat, ended = heartbeat(settings)
        if beat != last:
            last, changed = beat, now
        if ended:
            ended_at = now if ended_at is None else ended_at
            if now - ended_at >= settings["ended_s"]:
                return "the job has ended"
        elif last is None and now - changed >= settings["arrive_s"]:
            return f"no job has arrived within {settings['arrive_s']:g} s"
        elif last is not None and now - changed >= settings["silent_s"]:
            return f"the job's supervisor has been silent for {settings['silent_s']:g} s"
        time.sleep(LOOK_S)


def heartbeat(settings: dict[str, Any]) -> tuple[int | None, bool]:
    """Return when the job's supervisor last wrote its state, None if never, and True if the job has ended."""
    beat = None
    for directory in directories(settings):
        if os.path.exists(os.path.join(directory, "exit.json")):
            return beat, True
        with contextlib.suppress(OSError):
            beat = os.stat(os.path.join(directory, "state.json")).st_mtime_ns
    return beat, False


def directories(settings: dict[str, Any]) -> list[str]:
    """Return the paths where the job may be: below the home of any user."""
    root = settings["root"]
    homes = {user.pw_dir for user in pwd.getpwall()} | set(glob.glob("/home/*"))  # OS Login lists no users
    roots = [home + root[1:] for home in homes] if root.startswith("~") else [root]
    return [os.path.join(root, "jobs", settings["job"]) for root in roots]


def upload_result(settings: dict[str, Any]) -> bool:
    """Upload the job's result if there is a bucket for it. Return False if that must be retried."""
    for directory in directories(settings) if settings["result"] else []:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(directory, "exit.json"), "rb") as file:
            return request("PUT", settings["result"], file.read())
    return True


def request(method: str, url: str, data: bytes | None = None) -> bool:
    token = json.loads(metadata("service-accounts/default/token"))["access_token"]
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
    try:
        request = urllib.request.Request(url, method=method, headers=headers, data=data)
        with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as reply:
            log(f"{method} {url}: {reply.status}")
            return True
    except urllib.error.HTTPError as error:
        log(f"{method} {url}: {error} {error.read()[:1000]!r}")
    except OSError as error:
        log(f"{method} {url}: {error}")
    return False


def metadata(key: str) -> str:
    request = urllib.request.Request(METADATA + key, headers={"Metadata-Flavor": "Google"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as reply:
                text: str = reply.read().decode()
                return text
        except OSError as error:  # the network is not up yet
            log(f"metadata {key}: {error}")
        time.sleep(LOOK_S)


def log(text: str) -> None:
    print(f"accel: {text}", flush=True)


if __name__ == "__main__":
    main()
