"""Names on the Hub: over the wire from a server on this machine, from the cache, and with nobody there."""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.needs import package

package("torch")
package("transformers")

from .conftest import ROOT  # noqa: E402
from .models import CONFIGS  # noqa: E402

# Runs `accel estimate-memory` once for each list of words, and prints each exit code, stdout and stderr. In one
# process: the library that asks the Hub reads where it is when it is imported, which takes two seconds.
ESTIMATES = """
import contextlib, io, json, sys
from accel.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["estimate-memory", *words])
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


def estimates(*lines: list[str], **env: str) -> list[tuple[int, str, str]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    env = {name: value for name, value in env.items() if name != "HF_HUB_OFFLINE"}
    done = warm.run([sys.executable, "-c", ESTIMATES, json.dumps(lines)], cwd=None, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return [tuple(answer) for answer in json.loads(done.stdout)]


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
    llama = ["me/llama", "--dtypes", "float32", "--json"]
    messages = {
        "me/gated": "me/gated is gated",
        "me/none": "me/none: no such file, directory or model on http",
        "me/bare": "me/bare has no config.json",
        "not a name!": "'not a name!' is neither a file or directory nor a valid name",
    }
    (code, shown, said), *failed = estimates(llama, *([name] for name in messages), **env)
    assert code == 0, said
    assert json.loads(shown)["needs"][0]["activations"] > 0
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
    env["HF_ENDPOINT"] = "http://127.0.0.1:9"  # nobody listens
    cached, unknown = estimates(llama, ["me/other"], **env)
    assert json.loads(cached[1]) == json.loads(shown)
    silent = "http://127.0.0.1:9 cannot be reached, and its config.json is not in the cache"
    for answer, message in zip([*failed, unknown], [*messages.values(), silent], strict=True):
        assert answer[:2] == (1, "")
        (line,) = answer[2].splitlines()
        assert message in line
