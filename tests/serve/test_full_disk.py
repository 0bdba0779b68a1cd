"""A server whose home is on a full disk: it answers with the reason, and goes on when there is space again."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from schedulers.config.servers import Server
from schedulers.errors import Unreachable
from schedulers.service.client import Client, send_code
from schedulers.store.snapshot import pack
from schedulers.store.store import Store
from tests.schedulers.conftest import small_disk
from tests.waiting import until

from .test_server import Start

__all__ = ["small_disk"]


def test_a_full_disk(serve: Start, homes: Path, small_disk: Path) -> None:
    server = serve("--home", str(small_disk / "service"))
    token = (small_disk / "service/owner-token").read_text().strip()
    client = Client(Server(name="team", url=server.url, token=token))

    project = homes / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hi')\n")
    code = pack(project, homes / "client")
    send_code(client, code)

    def submit() -> str:
        job_id = Store("/nowhere").new_id()
        body = {"spec": {"argv": ["train.py"]}, "target": "local", "digest": code.digest}
        client.request("PUT", f"/jobs/{job_id}", document=body, attempts=1)
        return job_id

    def succeeds(job_id: str) -> None:
        until(lambda: client.get(f"/jobs/{job_id}")["status"]["state"] == "succeeded", "the job succeeds")

    first = submit()
    succeeds(first)
    log = client.request("GET", f"/jobs/{first}/logs").body
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as fill:
        while True:
            fill.write(bytes(4096))
    with pytest.raises(Unreachable, match="team: the database does not answer: database or disk is full"):
        submit()
    (project / "data").write_bytes(os.urandom(100_000))
    larger = pack(project, homes / "client")
    with pytest.raises(Unreachable, match=r"team: disk full: cannot write .*; free space or move ACCEL_HOME"):
        send_code(client, larger)
    assert [job["id"] for job in client.get("/jobs")["jobs"]] == [first]
    assert client.request("GET", f"/jobs/{first}/logs").body == log

    (small_disk / "fill").unlink()
    send_code(client, larger)
    succeeds(submit())
    server.stop()
