"""Tokens, roles and users: who may do what, and that each change and refusal is recorded."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from accel.serve import people
from accel.serve.context import ServeContext
from accel.serve.server import check
from accel.serve.settings import Settings, TargetRules
from accel.serve.tables import audit, token
from schedulers.errors import ConfigError

from .conftest import Api


@pytest.fixture
def settings(homes: Path) -> Settings:
    """A server whose one target may be shared."""
    (homes / "config/accel.yaml").write_text("targets: {lab: {kind: kubernetes}}\n")
    return Settings(home=str(homes / "home/service"), targets={"lab": TargetRules(run_as="service")})


def _token(owner: TestClient, **body: object) -> str:
    answer = owner.post("/api/v1/tokens", json=body)
    assert answer.status_code == 201, answer.text
    secret = answer.json()["token"]
    assert re.fullmatch(r"accel_[0-9A-Za-z]{8}_[0-9A-Za-z]{49}", secret)
    return str(secret)


def test_the_owner_of_the_process_is_an_owner(owner: TestClient) -> None:
    me = owner.get("/api/v1/me").json()
    assert (me["role"], me["targets"]) == ("owner", ["lab"])
    (listed,) = owner.get("/api/v1/tokens").json()
    assert (listed["id"], listed["user"]) == (me["token"], me["name"])
    assert listed["used_at"] % 3600 == 0
    rows = [(row["user"], row["action"], row["object"], row["outcome"]) for row in owner.get("/api/v1/audit").json()]
    assert rows == [
        ("accel serve", "create", f"token {me['token']} of {me['name']}", "done"),
        ("accel serve", "set role", f"user {me['name']}", "owner"),
    ]


def test_the_audit_log_is_kept_for_400_days(owner: TestClient, context: ServeContext) -> None:
    for _ in range(2):
        answer = owner.post("/api/v1/tokens", json={})
    rows = owner.get("/api/v1/audit").json()
    assert rows[0]["request_id"] == answer.headers["X-Request-Id"]
    with context.database.write() as connection:
        for row, days in zip(rows, (399, 401), strict=False):
            chosen = update(audit).where(audit.c.id == row["id"])
            connection.execute(chosen.values(at=time.time() - days * 86_400))
    owner.post("/api/v1/tokens", json={})
    remaining = {row["id"] for row in owner.get("/api/v1/audit").json()}
    assert {row["id"] for row in rows} - remaining == {rows[1]["id"]}


@pytest.mark.parametrize(
    ("header", "detail"),
    [
        ("", "no token: send one in the header Authorization: Bearer TOKEN"),
        ("Basic YTpi", "no token: send one in the header Authorization: Bearer TOKEN"),
        ("Bearer accel_12345678_" + "a" * 49, "malformed token: copy all of it"),
        ("Bearer x", "malformed token: copy all of it"),
    ],
)
def test_without_a_token_there_is_nothing(api: Api, owner: TestClient, header: str, detail: str) -> None:
    answer = api("").get("/api/v1/me", headers={"Authorization": header} if header else {})
    assert (answer.status_code, answer.json()["detail"]) == (401, detail)
    assert answer.headers["www-authenticate"] == "Bearer"
    rows = [(row["user"], row["action"], row["outcome"]) for row in owner.get("/api/v1/audit").json()]
    assert rows[:-2] == ([("", "log in", detail)] if header.startswith("Bearer") else [])


def test_a_token_ends(api: Api, owner: TestClient, context: ServeContext) -> None:
    secret = _token(owner, days=1)
    assert api(secret).get("/api/v1/me").status_code == 200
    assert api(secret[:-1] + ("0" if secret[-1] != "0" else "1")).get("/api/v1/me").status_code == 401
    with context.database.write() as connection:
        connection.execute(update(token).where(token.c.id == secret[6:14]).values(expires_at=86_400.0))
    assert api(secret).get("/api/v1/me").json()["detail"] == "the token expired on 1970-01-02"
    revoked = _token(owner)
    assert api(revoked).delete(f"/api/v1/tokens/{revoked[6:14]}").status_code == 204
    assert api(revoked).get("/api/v1/me").json()["detail"] == "the token was revoked"
    assert owner.delete(f"/api/v1/tokens/{revoked[6:14]}").status_code == 404


def test_ten_wrong_tokens_a_minute(api: Api, owner: TestClient) -> None:
    client = api("accel_12345678_" + "a" * 49)
    statuses = [client.get("/api/v1/me").status_code for _ in range(11)]
    assert statuses == [401] * 10 + [429]
    answer = client.get("/api/v1/me")
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert owner.get("/api/v1/me").status_code == 200  # of others at the same address
    assert api("").get("/api/v1/me").status_code == 401
    assert [row["action"] for row in owner.get("/api/v1/audit").json()][:-2] == ["log in"] * 10


def test_roles(api: Api, owner: TestClient) -> None:
    viewer, submitter = _token(owner, user="vera", role="viewer"), _token(owner, user="sam")
    assert api(submitter).get("/api/v1/me").json()["role"] == "submitter"
    for secret in (viewer, submitter):
        client = api(secret)
        assert client.get("/api/v1/me").status_code == 200
        assert [t["id"] for t in client.get("/api/v1/tokens").json()] == [secret[6:14]]
        for method, path in (("GET", "/users"), ("GET", "/audit"), ("PUT", "/users/eve"), ("DELETE", "/users/sam")):
            answer = client.request(method, f"/api/v1{path}", json={"role": "owner"} if method == "PUT" else None)
            assert answer.status_code == 403, (method, path)
            assert answer.json()["detail"].startswith(f"{method} /api/v1{path} requires role owner; ")
        answer = client.post("/api/v1/tokens", json={"user": "eve"})
        assert (answer.status_code, "tokens of others" in answer.json()["detail"]) == (403, True)
        assert client.delete(f"/api/v1/tokens/{owner.get('/api/v1/me').json()['token']}").status_code == 404
    rows = owner.get("/api/v1/audit").json()
    assert sum(row["outcome"].startswith("refused") for row in rows) == 10
    assert {row["user"] for row in rows if row["outcome"].startswith("refused")} == {"vera", "sam"}
    first = owner.get("/api/v1/audit?limit=2").json()
    older = owner.get(f"/api/v1/audit?limit=2&before={first[-1]['id']}").json()
    assert [row["id"] for row in first + older] == [row["id"] for row in rows[:4]]


def test_users(owner: TestClient) -> None:
    me = owner.get("/api/v1/me").json()["name"]
    assert owner.put("/api/v1/users/grace", json={"role": "viewer"}).json()["role"] == "viewer"
    assert owner.put("/api/v1/users/grace", json={"role": "submitter"}).status_code == 200
    assert {u["name"]: u["role"] for u in owner.get("/api/v1/users").json()} == {me: "owner", "grace": "submitter"}
    assert owner.post("/api/v1/tokens", json={"user": "grace", "role": "owner"}).status_code == 409
    for method, body in (("PUT", {"role": "viewer"}), ("DELETE", None)):
        answer = owner.request(method, f"/api/v1/users/{me}", json=body)
        assert (answer.status_code, "is the only owner" in answer.json()["detail"]) == (409, True)
    assert owner.delete("/api/v1/users/grace").status_code == 204
    assert owner.get("/api/v1/users/grace").status_code == 404
    assert owner.put("/api/v1/users/a%20b", json={"role": "viewer"}).status_code == 422


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ({}, "by a job on target here, which runs as the server"),
        ({"lab": TargetRules()}, "set `run_as: service` for it"),
        ({"here": TargetRules(run_as="service")}, "by a job on target here"),
    ],
)
def test_a_second_user_needs_targets_that_may_be_shared(
    api: Api, context: ServeContext, homes: Path, targets: dict[str, TargetRules], reason: str
) -> None:
    (homes / "config/accel.yaml").write_text("targets: {lab: {kind: kubernetes}, here: {kind: slurm}}\n")
    object.__setattr__(context.settings, "targets", targets)
    secret = (Path(context.settings.home) / people.TOKEN_FILE).read_text().strip()
    answer = api(secret).put("/api/v1/users/grace", json={"role": "viewer"})
    assert answer.status_code == 409
    assert reason in answer.json()["detail"]
    row = api(secret).get("/api/v1/audit").json()[0]
    assert (row["object"], row["outcome"]) == ("/api/v1/users/grace", f"refused: {answer.json()['detail']}")


def test_slurm_over_ssh_may_be_shared(owner: TestClient, context: ServeContext, homes: Path) -> None:
    (homes / "config/accel.yaml").write_text("targets: {far: {kind: slurm, login: head}}\n")
    object.__setattr__(context.settings, "targets", {"far": TargetRules(run_as="service")})
    assert owner.put("/api/v1/users/grace", json={"role": "viewer"}).status_code == 200


def test_a_server_with_two_users_does_not_start_with_such_targets(owner: TestClient, context: ServeContext) -> None:
    _token(owner, user="sam")
    object.__setattr__(context.settings, "targets", {"local": TargetRules(run_as="service")})
    with pytest.raises(ConfigError, match="a second user could read"):
        people.start(context)
    rows = {part: (is_ok, detail) for part, is_ok, detail in check(context.settings)}
    assert rows["database"] == (True, "")
    assert (rows["users"][0], "a second user could read" in rows["users"][1]) == (False, True)


def test_a_start_replaces_a_token_that_ends_soon(context: ServeContext) -> None:
    file = Path(context.settings.home) / people.TOKEN_FILE
    first = file.read_text()
    people.start(context)
    assert file.read_text() == first
    with context.database.write() as connection:
        connection.execute(update(token).values(expires_at=time.time() + 86_400))
    people.start(context)
    assert file.read_text() != first
    assert file.stat().st_mode & 0o777 == 0o600


def test_only_digests_of_tokens_are_stored(context: ServeContext) -> None:
    stored = b"".join(path.read_bytes() for path in Path(context.settings.home).glob("service.db*"))
    current = (Path(context.settings.home) / people.TOKEN_FILE).read_bytes().strip()
    assert current[6:14] in stored
    assert current[15:58] not in stored
