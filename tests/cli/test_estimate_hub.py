"""Names on the Hub: over the wire from a server on this machine, from the cache, and with nobody there."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import package

package("torch")
package("transformers")

from .models import CONFIGS, estimate  # noqa: E402


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as fetching one file takes."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.strip("/").partition("/resolve/main/")[0]
        body = json.dumps(CONFIGS["llama"]).encode() if name == "me/llama" else b""
        error = {"me/gated": ("GatedRepo", 403), "me/bare": ("EntryNotFound", 404)}.get(name, ("RepoNotFound", 404))
        self.send_response(200 if body else error[1])
        if not body:
            self.send_header("X-Error-Code", error[0])
        self.send_header("ETag", '"e"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    handler = type("Handler", (Hub,), {"asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", handler.asked  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


def test_a_name_on_the_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    where, asked = hub
    env = {"HF_ENDPOINT": where, "HF_HOME": str(tmp_path)}
    done = estimate("me/llama", "--dtypes", "float32", "--json", **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["needs"][0]["activations"] > 0
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
    for name, message in (
        ("me/gated", "me/gated is gated"),
        ("me/none", "me/none: no such file, directory or model on http"),
        ("me/bare", "me/bare has no config.json"),
        ("not a name!", "'not a name!' is no file or directory here, and no name"),
    ):
        failed = estimate(name, **env)
        assert (failed.returncode, failed.stdout) == (1, "")
        (line,) = failed.stderr.splitlines()
        assert message in line
    env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
    cached = estimate("me/llama", "--dtypes", "float32", "--json", **env)
    assert json.loads(cached.stdout) == json.loads(done.stdout)
    failed = estimate("me/other", **env)
    assert failed.returncode == 1
    (line,) = failed.stderr.splitlines()
    assert "http://127.0.0.1:9 cannot be reached, and its config.json is not in the cache" in line
