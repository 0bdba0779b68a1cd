"""`accel tpu-config` through Google's own `gcloud`, where it is installed, against a server that is like Cloud TPU's.

Its `ssh` is a stand-in that notes the command (the words that follow `--`, with spaces between) and runs it in a shell,
as ssh and sshd do.
"""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import needs

from .conftest import Accel

SSH = """#!/usr/bin/env python3
import json, os, subprocess, sys
at = sys.argv.index("--")
command, host = " ".join(sys.argv[at + 1 :]), sys.argv[at - 1].partition("@")[2]
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls"), "a") as file:
    file.write(json.dumps(command) + "\\n")
sys.exit(subprocess.run(["bash", "-c", command], env={**os.environ, "WORKER": host}).returncode)
"""


class Cloud(http.server.BaseHTTPRequestHandler):
    """As much of the APIs of Cloud TPU and Compute Engine as `describe` and `ssh` ask: a pod of two workers."""

    metadata: dict[str, str]
    asked: list[str]

    def _answer(self) -> None:
        said = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        if path.endswith(":getGuestAttributes"):
            self._send({"guestAttributes": [{"queryPath": "hostkeys/", "queryValue": {"items": []}}]})
        elif "/nodes/" in path and self.command == "PATCH":
            self.metadata.update(json.loads(said)["metadata"])
            place = path.partition("/v2")[2].partition("/")[2].partition("/nodes/")[0]
            node = {"@type": f"type.googleapis.com/google.cloud.tpu.{path.split('/')[1]}.Node", "name": "pod"}
            self._send({"name": f"{place}/operations/op1", "done": True, "response": node})
        elif "/nodes/" in path:
            ends = [{"ipAddress": ip, "accessConfig": {"externalIp": ip}} for ip in ("127.0.0.2", "127.0.0.3")]
            self._send({"state": "READY", "networkEndpoints": ends, "metadata": self.metadata})
        elif "/operations/" in path:
            node = {"@type": f"type.googleapis.com/google.cloud.tpu.{path.split('/')[1]}.Node", "name": "pod"}
            self._send({"name": path.partition("/v2")[2].partition("/")[2], "done": True, "response": node})
        else:
            self._send({"name": "p", "id": "1", "commonInstanceMetadata": {"fingerprint": "eA==", "items": []}})

    do_GET = do_POST = do_PATCH = _answer  # noqa: N815  # the names that http.server calls

    def _send(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Gcloud:
    def __init__(self, accel: Accel, folder: Path, port: int) -> None:
        self.accel, self.folder = accel, folder
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        (folder / "ssh").write_text(SSH)
        (folder / "ssh").chmod(0o755)
        where = f"http://127.0.0.1:{port}"
        self.env = {
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(self.home),
            "CLOUDSDK_CONFIG": str(folder / "config"),
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CORE_PROJECT": "p",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{where}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{where}/compute/v1/",
        }

    def __call__(self, *argv: str, code: int = 0) -> tuple[list[str], str]:
        done = self.accel.finish("tpu-config", "--tpu_zone", "z", *argv, **self.env)
        assert done.returncode == code, done.stdout.decode() + done.stderr.decode()
        return sorted(done.stdout.decode().splitlines()), done.stderr.decode()

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def gcloud(accel: Accel, tmp_path: Path) -> Iterator[Gcloud]:
    needs.gcloud()
    handler = type("Handler", (Cloud,), {"metadata": {}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Gcloud(accel, tmp_path / "cloud", server.server_port)
    server.shutdown()
    server.server_close()


HOSTILE = """echo 'a "b"  c' "$(echo $WORKER)" 'é; \\'"""


def test_every_worker_runs_it_the_first_time_too(gcloud: Gcloud) -> None:
    """The first time gcloud has no key to sign in with: the workers' calls must not make it over one another."""
    out, said = gcloud("--tpu_name", "pod1", "--command", HOSTILE, "echo $PWD")
    assert out == sorted(
        line for n in (0, 1) for line in (f'[worker {n}] a "b"  c 127.0.0.{n + 2} é; \\', f"[worker {n}] /usr/share")
    ), said
    assert (gcloud.home / ".ssh/google_compute_engine").exists()
    for call in gcloud.calls()[-2:]:
        assert call == (f"set -e\ncd /usr/share\n{HOSTILE}\necho $PWD")


@pytest.mark.long
def test_a_name_with_spaces_and_quotes_and_a_command_that_fails(gcloud: Gcloud) -> None:
    (gcloud.home / ".ssh").mkdir(mode=0o700)
    failing = "[ $WORKER = 127.0.0.3 ] && exit 7; sleep 300"
    out, said = gcloud("--use_alpha", "--tpu_name", 'it\'s a "pod"', "--command", failing, "echo on", code=7)
    assert out == []
    assert said.splitlines()[-1] == "accel: worker 1 ended with code 7; ending the other 1"
