"""Errors and limits of every request, and the description of the API."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

import accel
from accel.serve.context import ServeContext

from .conftest import BASE, Api


def test_health_needs_no_token(api: Api, context: ServeContext) -> None:
    client = api("")
    assert client.get("/healthz").text == "ok\n"
    assert client.get("/readyz").text == "ok\n"
    expected = {"id": context.id, "version": accel.__version__, "api": 1, "login": ["token"]}
    assert client.get("/api/v1/info").json() == expected
    context.ending.set()
    assert client.get("/readyz").status_code == 503
    assert client.get("/readyz").json()["detail"] == "the server is shutting down"


def test_it_is_not_ready_without_its_database(api: Api, context: ServeContext) -> None:
    context.database.close()
    for path in context.home.glob("service.db*"):
        path.unlink()
    (context.home / "service.db").mkdir()
    answer = api("").get("/readyz")
    assert (answer.status_code, api("").get("/healthz").status_code) == (503, 200)
    assert answer.json()["detail"] == "the database does not answer: unable to open database file"


def test_pages_of_other_origins_get_no_answers(owner: TestClient) -> None:
    origin = {"Origin": "https://evil.example.org", "Access-Control-Request-Method": "GET"}
    for method in ("GET", "OPTIONS"):
        answer = owner.request(method, "/api/v1/me", headers=origin)
        assert answer.status_code == (200 if method == "GET" else 405)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("host", ["evil.example.org", "", "127.0.0.1.evil.org:8765", "[::2]:8765"])
def test_a_foreign_host_is_refused(api: Api, host: str) -> None:
    answer = api("").get("/healthz", headers={"Host": host})
    assert answer.status_code == 400
    assert "this server does not answer for" in answer.json()["detail"]


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "[::1]:8765", "LOCALHOST:8765"])
def test_loopback_is_always_a_host(api: Api, host: str) -> None:
    assert api("").get("/healthz", headers={"Host": host}).status_code == 200


def test_a_large_body_is_refused_with_and_without_its_length(owner: TestClient) -> None:
    body = b"x" * (2**20 + 1)
    for content in (body, iter([body[:100], body[100:]])):
        answer = owner.post("/api/v1/tokens", content=content)
        assert answer.status_code == 413
        assert answer.json()["detail"] == "the body has more than 1.0 MiB"
        assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[" * 100_000, b'{"user": NaN}', b"\xff\xfe", b'{"days": 1e999}', b'{"user": "\\udcff"}', b"[]",
     b'"a"',     b'{"days": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_body_that_is_no_request_is_a_problem(owner: TestClient, body: bytes) -> None:
    answer = owner.post("/api/v1/tokens", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["status"] == answer.status_code
    assert "\n" not in answer.json()["detail"]


def test_unknown_keys_are_named(owner: TestClient) -> None:
    answer = owner.post("/api/v1/tokens", json={"dayz": 3})
    assert (answer.status_code, answer.json()["where"]) == (422, "body.dayz")
    assert answer.json()["detail"] == "body: unknown key 'dayz'"
    answer = owner.get("/api/v1/audit?limt=3")
    assert (answer.status_code, answer.json()["detail"]) == (422, "query: unknown key 'limt'")


def test_paths_and_methods_that_are_not_there(owner: TestClient) -> None:
    assert owner.get("/api/v1/nothing").json()["detail"] == "Not Found"
    answer = owner.post("/api/v1/me")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
    assert answer.json()["title"] == "Method Not Allowed"


def test_the_description_names_every_error(owner: TestClient) -> None:
    document = owner.get("/api/v1/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert "Problem" in document["components"]["schemas"]
    operation = document["paths"]["/api/v1/tokens"]["post"]
    assert operation["security"] == [{"HTTPBearer": []}]
    for status in ("401", "403", "409", "413", "422", "429", "503"):
        assert "application/problem+json" in operation["responses"][status]["content"]
    assert BASE.startswith("http://127.0.0.1")
