"""The server behind nginx with Debian's defaults: bodies of 1 MiB, buffered answers, addresses in a header."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers.config.servers import Server
from schedulers.processes import die_with_parent
from schedulers.service.client import Client, RequestRefused, send_code
from schedulers.store.snapshot import pack
from schedulers.store.store import Store
from tests.needs import missing
from tests.ports import free_port

from .test_server import Start

_CONFIGURATION = """
user root;
daemon off;
pid {here}/pid;
error_log {here}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {here}/body;
    proxy_temp_path {here}/proxy;
    fastcgi_temp_path {here}/fastcgi;
    uwsgi_temp_path {here}/uwsgi;
    scgi_temp_path {here}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass {url};
            proxy_set_header Host $host;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
        }}
    }}
}}
"""


@pytest.fixture
def nginx(serve: Start, tmp_path: Path) -> Iterator[str]:
    """The URL of a proxy in front of a server."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        missing("nginx", "apt-get install nginx-light")
    server = serve("--behind-proxy", "127.0.0.1/32")
    port = free_port()
    configuration = tmp_path / "nginx.conf"
    configuration.write_text(_CONFIGURATION.format(here=tmp_path, port=port, url=server.url))
    process = subprocess.Popen([program, "-c", str(configuration)], preexec_fn=die_with_parent)
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_code_jobs_and_logs_pass_a_proxy(nginx: str, homes: Path) -> None:
    client = Client(Server(name="team", url=nginx, token=(homes / "home/service/owner-token").read_text().strip()))
    project = homes / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    (project / "data").write_bytes(os.urandom(2_300_000))
    snapshot = pack(project, homes / "client")
    send_code(client, snapshot)

    gate, job_id = homes / "gate", Store("/nowhere").new_id()
    script = f"echo first; while [ ! -e {gate} ]; do sleep 0.05; done; echo second"
    body = {"spec": {"argv": ["sh", "-c", script], "entry": "command"}, "target": "local", "digest": snapshot.digest}
    client.request("PUT", f"/jobs/{job_id}", document=body)
    host = nginx.removeprefix("http://")
    with socket.create_connection(tuple(host.split(":"))) as stream, stream.makefile("rwb") as events:  # type: ignore[arg-type]
        request = f"GET /api/v1/jobs/{job_id}/logs/stream HTTP/1.1\r\nHost: {host}\r\n"
        events.write(f"{request}Authorization: Bearer {client.server.token}\r\n\r\n".encode())
        events.flush()
        lines = (json.loads(line[5:])["text"] for line in events if line.startswith(b"data:") and b'"text"' in line)
        assert next(lines) == "first\n"  # while the answer goes on
        gate.touch()
        assert next(lines) == "second\n"

    with pytest.raises(RequestRefused) as refusal:
        client.request("PUT", f"/jobs/{job_id}", document={"spec": {"argv": ["x" * 3_000_000]}})
    assert refusal.value.status == 413
    wrong = Client(Server(name="team", url=nginx, token="wrong"))
    with pytest.raises(Exception, match="malformed token"):
        wrong.get("/me")
    assert client.get("/audit")[0]["address"] == "127.0.0.1"
