"""Code arrives in pieces, is continued where it was cut off, and is kept only if it is what its digest says."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from accel.serve import code
from accel.serve.context import ServeContext
from accel.serve.settings import Settings, TargetRules
from schedulers.config.servers import Server
from schedulers.service import client as clients
from schedulers.service.client import Client, send_code
from schedulers.store.snapshot import Snapshot, pack

from .conftest import Api
from .test_server import Start


@pytest.fixture
def snapshot(homes: Path) -> Snapshot:
    """A snapshot of three pieces."""
    directory = homes / "project"
    directory.mkdir()
    (directory / "train.py").write_text("print(1)\n")
    (directory / "data").write_bytes(os.urandom(2_300_000))
    return pack(directory, homes / "client")


def _patch(
    client: TestClient, snapshot: Snapshot, offset: int, data: bytes, size: int | None = None
) -> tuple[int, str]:
    headers = {"Accel-Offset": str(offset), "Accel-Size": str(size or snapshot.path.stat().st_size)}
    answer = client.patch(f"/api/v1/code/{snapshot.digest}", content=data, headers=headers)
    return answer.status_code, "" if answer.status_code < 300 else answer.json()["detail"]


def test_an_upload_that_was_cut_off_sends_the_rest(
    serve: Start, homes: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    home = homes / "home/service"
    client = Client(Server(name="team", url=server.url, token=(home / "owner-token").read_text().strip()))
    request = Client.request
    sent: list[int] = []

    def cut_off(self: Client, method: str, path: str, **how: object) -> clients.Answer:
        if method == "PATCH":
            if len(sent) == 2:
                raise KeyboardInterrupt
            sent.append(len(how["data"]))  # type: ignore[arg-type]
        return request(self, method, path, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(Client, "request", cut_off)
    with pytest.raises(KeyboardInterrupt):
        send_code(client, snapshot)
    sent[:] = [0]
    send_code(client, snapshot)
    size = snapshot.path.stat().st_size
    assert sent == [0, size - 2 * 2**20]
    assert (home / "snapshots" / snapshot.path.name).read_bytes() == snapshot.path.read_bytes()
    assert (home / "code" / snapshot.digest / "train.py").read_text() == "print(1)\n"
    # The server packs its copy as the same snapshot, and what it has is not sent again.
    assert pack(home / "code" / snapshot.digest, home).digest == snapshot.digest
    sent[:] = []
    send_code(client, snapshot)
    assert sent == []


def test_pieces_that_do_not_fit(owner: TestClient, snapshot: Snapshot, context: ServeContext) -> None:
    data = snapshot.path.read_bytes()
    assert owner.head(f"/api/v1/code/{snapshot.digest}").status_code == 404
    assert _patch(owner, snapshot, 5, data[5:10]) == (409, f"the upload continues at byte 0 of {len(data):,}")
    assert _patch(owner, snapshot, 0, data[:1000]) == (202, "")
    assert _patch(owner, snapshot, 0, data[:1000])[0] == 409
    assert owner.head(f"/api/v1/code/{snapshot.digest}").headers["accel-offset"] == "1000"
    assert _patch(owner, snapshot, 1000, data[1000:1100], size=1050)[0] == 409
    too_much = _patch(owner, snapshot, 1000, b"x", size=2**40)
    assert too_much == (413, "the code has 1.0 TiB, at most 2.0 GiB are allowed")
    assert owner.patch("/api/v1/code/abc", content=b"").status_code == 422
    old = time.time() - 2 * 86_400
    for path in (context.home / "uploads").glob("*/*"):
        os.utime(path, (old, old))
    code.delete_abandoned(context)
    assert owner.head(f"/api/v1/code/{snapshot.digest}").status_code == 404


def test_what_is_not_the_code_of_the_digest_is_refused(owner: TestClient, snapshot: Snapshot) -> None:
    for data, reason in ((b"rubbish" * 500, "is damaged"), (b"\0" * 10_240, "its content has another digest")):
        status, detail = _patch(owner, snapshot, 0, data, size=len(data))
        assert (status, reason in detail, str(snapshot.path) in detail) == (422, True, False), detail
        assert owner.head(f"/api/v1/code/{snapshot.digest}").status_code == 404


def test_too_many_files(owner: TestClient, context: ServeContext, homes: Path) -> None:
    many = homes / "many"
    many.mkdir()
    for number in range(5):
        (many / str(number)).touch()
    snapshot = pack(many, homes / "client")
    object.__setattr__(context.settings, "max_files", 4)
    data = snapshot.path.read_bytes()
    status, detail = _patch(owner, snapshot, 0, data)
    assert status == 422
    assert detail.endswith("cannot be unpacked: the archive holds more than 4 files"), detail
    assert str(context.home) not in detail


def test_a_digest_gives_nobody_the_code_of_others(api: Api, homes: Path, context: ServeContext) -> None:
    (homes / "config/accel.yaml").write_text("targets: {lab: {kind: kubernetes}}\n")
    rules = {"lab": TargetRules(run_as="service", allow_options=("queue",))}
    object.__setattr__(context.settings, "targets", rules)
    owner = api((context.home / "owner-token").read_text().strip())
    (homes / "a").mkdir()
    (homes / "a/train.py").write_text("secret\n")
    snapshot = pack(homes / "a", homes / "client")
    data = snapshot.path.read_bytes()
    assert _patch(owner, snapshot, 0, data) == (201, "")
    assert owner.head(f"/api/v1/code/{snapshot.digest}").headers["accel-complete"] == "true"
    other = api(owner.post("/api/v1/tokens", json={"user": "sam"}).json()["token"])
    assert other.head(f"/api/v1/code/{snapshot.digest}").status_code == 404
    rubbish = b"\0" * 10_240
    assert _patch(other, snapshot, 0, rubbish, size=len(rubbish))[0] == 422
    assert other.head(f"/api/v1/code/{snapshot.digest}").status_code == 404
    assert _patch(other, snapshot, 0, data) == (201, "")
    viewer = api(owner.post("/api/v1/tokens", json={"user": "vera", "role": "viewer"}).json()["token"])
    assert viewer.head(f"/api/v1/code/{snapshot.digest}").status_code == 403
    shared = {"name": "lab", "kind": "kubernetes", "run_as": "service", "answered_at": None}
    assert owner.get("/api/v1/targets").json() == [{**shared, "options": None}]
    assert viewer.get("/api/v1/targets").json() == [{**shared, "options": ["queue"]}]


def test_a_home_that_cannot_be_written_is_a_problem(owner: TestClient, snapshot: Snapshot, settings: Settings) -> None:
    uploads = Path(settings.home) / "uploads"
    uploads.write_text("")  # where a directory has to be
    status, detail = _patch(owner, snapshot, 0, b"x")
    assert (status, str(uploads) in detail) == (503, True)
