"""The API as its description says it: the kept document, requests made from it, and who may do what."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from accel.serve.context import ServeContext
from tests.golden import assert_golden
from tests.needs import package

from .conftest import Api
from .test_server import Start

package("schemathesis")

PREFIX = "/api/v1"

# What an operation needs at least; in this order each role may do what those before it may.
LEAST = {
    "none": {"GET /info"},
    "viewer": {
        "GET /me", "GET /targets", "GET /tokens", "POST /tokens", "DELETE /tokens/{token_id}", "GET /jobs",
        "GET /jobs/{job_id}", "GET /jobs/{job_id}/describe", "GET /jobs/{job_id}/logs",
        "GET /jobs/{job_id}/logs/stream", "GET /jobs/{job_id}/logs.gz",
    },
    "submitter": {
        "HEAD /code/{digest}", "PATCH /code/{digest}", "PUT /jobs/{job_id}", "DELETE /jobs/{job_id}",
        "POST /jobs/{job_id}/cancel",
    },
    "owner": {"GET /users", "GET /users/{name}", "PUT /users/{name}", "DELETE /users/{name}", "GET /audit"},
}  # fmt: skip
_TARGETS = "targets:\n  lab: {kind: kubernetes, image: train, kubeconfig: /nonexistent}\n"
_LONG = pytest.mark.long
_SETTINGS = "targets:\n  lab: {run_as: service, allow_options: [queue]}\n"


@pytest.fixture
def homes(homes: Path) -> Path:
    """With a target that several users may share."""
    (homes / "config/accel.yaml").write_text(_TARGETS)
    (homes / "config/serve.yaml").write_text(_SETTINGS)
    return homes


def test_the_description_is_the_kept_one(api: Api) -> None:
    document = api("").get(f"{PREFIX}/openapi.json").json()
    document["info"]["version"] = "VERSION"
    assert_golden("openapi.json", json.dumps(document, indent=1, sort_keys=True) + "\n")


def test_each_operation_has_its_least_role(api: Api, owner: TestClient) -> None:
    tokens = {"none": ""}
    for role in ("viewer", "submitter", "owner"):
        tokens[role] = owner.post(f"{PREFIX}/tokens", json={"user": role, "role": role}).json()["token"]
    paths = owner.get(f"{PREFIX}/openapi.json").json()["paths"]
    operations = {
        f"{method.upper()} {path.removeprefix(PREFIX)}" for path, methods in paths.items() for method in methods
    }
    assert operations == set.union(*LEAST.values())
    roles = list(LEAST)
    for least, names in LEAST.items():
        for name in sorted(names):
            method, _, path = name.partition(" ")
            url = PREFIX + re.sub(r"{\w+}", "0" * (64 if "digest" in path else 11), path)
            for role, token in tokens.items():
                status = api(token).request(method, url).status_code
                expected = 401 if role == "none" else 403
                is_refused = roles.index(role) < roles.index(least)
                assert (status == expected) == is_refused, (name, role, status)


@pytest.mark.parametrize(
    "role", [pytest.param("nobody", marks=_LONG), pytest.param("viewer", marks=_LONG), "submitter", "owner"]
)
def test_made_up_requests_get_documented_answers(serve: Start, homes: Path, role: str) -> None:
    """No 5xx, and nothing that the description lacks, with values from its schemas and next to them."""
    server = serve()
    secret = (homes / "home/service/owner-token").read_text().strip()
    if role not in ("nobody", "owner"):
        headers = ("--user", role, "--role", role)
        login = [sys.executable, "-m", "accel", "login", server.url, "--token-file", "-", "--name", "team"]
        subprocess.run(login, input=secret, text=True, check=True, capture_output=True)
        create = [sys.executable, "-m", "accel", "token", "create", *headers]
        secret = subprocess.run(create, text=True, check=True, capture_output=True).stdout.split()[-1]
    header = f"Authorization: Bearer {secret}" if role != "nobody" else "X-Nobody: 1"
    # Not checked: that valid values are accepted (a target is unknown, a script is missing), and that a wrong token is
    # answered with 401, since after ten of them it is 429.
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}{PREFIX}/openapi.json",
        "--header", header, "--max-examples", "10", "--seed", "1", "--phases", "coverage,fuzzing,stateful",
        "--exclude-checks", "positive_data_acceptance,ignored_auth", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=homes, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-6000:]
    printed = server.stop()
    assert "Traceback" not in printed, printed


def test_metrics(owner: TestClient, api: Api, context: ServeContext) -> None:
    owner.get(f"{PREFIX}/me")
    text = owner.get("/metrics").text
    assert 'accel_requests_total{endpoint="me",status="200"} 1.0' in text
    assert "# TYPE accel_jobs gauge" in text
    assert api("").get("/metrics").status_code == 401
