"""Jobs of a server: what is accepted, that each is submitted once, and what becomes of it."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fastapi import Response
from fastapi.testclient import TestClient
from sqlalchemy import insert, select

from accel.serve import jobs, submits, workers
from accel.serve.auth import Caller
from accel.serve.context import ServeContext
from accel.serve.problems import Problem
from accel.serve.settings import Settings, TargetRules
from accel.serve.spool_file import last_mark
from accel.serve.tables import audit, code, job
from accel.serve.workers import Submitter, submit_row, working
from schedulers.config.servers import Server
from schedulers.jobs.submit import admit
from schedulers.service.client import Client, send_code
from schedulers.store.snapshot import Snapshot, pack
from schedulers.store.store import Store
from tests.waiting import until

from .conftest import Api
from .test_server import Start

Body = dict[str, Any]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    directory = tmp_path_factory.mktemp("project")
    (directory / "train.py").write_text("print('trained')\n")
    (directory / ".env.example").write_text("x\n")
    (directory / ".accelignore").write_text("!.env.example\n")
    return pack(directory, tmp_path_factory.mktemp("client"))


@pytest.fixture
def digest(owner: TestClient, snapshot: Snapshot) -> str:
    """The digest of code that the owner has sent."""
    return _send(owner, snapshot)


@pytest.fixture
def works(context: ServeContext) -> Iterator[ServeContext]:
    """The server's context while its threads run."""
    with working(context):
        yield context


def _send(client: TestClient, snapshot: Snapshot) -> str:
    data = snapshot.path.read_bytes()
    headers = {"Accel-Offset": "0", "Accel-Size": str(len(data))}
    assert client.patch(f"/api/v1/code/{snapshot.digest}", content=data, headers=headers).status_code == 201
    return snapshot.digest


def _command(script: str, digest: str | None, **spec: object) -> Body:
    body: Body = {"spec": {"argv": ["sh", "-c", script], "entry": "command", **spec}, "target": "local"}
    return body if digest is None else body | {"digest": digest}


def _add(context: ServeContext, count: int, **columns: object) -> list[str]:
    """Add rows of jobs; return their ids."""
    row: dict[str, object] = dict.fromkeys(("message", "native_state", "warning", "sha256"), "")
    row |= {"owner": "ada", "project": "default", "target": "local", "kind": "local", "nodes": 1, "gpus": 0}
    row |= {"reason": "none", "attempt": 0, "observed_at": 1.0, "request": "{}", "changed_at": 1.0, **columns}
    ids = [_new_id() for _ in range(count)]
    rows = [
        {**row, "id": job_id, "name": f"run {number % 2}", "created_at": float(number)}
        for number, job_id in enumerate(ids)
    ]
    with context.database.write() as connection:
        connection.execute(insert(job), rows)
    return ids


def _new_id() -> str:
    return Store("/nowhere").new_id()


def _put(client: TestClient, body: Body, job_id: str = "", status: int = 201, **query: str) -> Any:
    answer = client.put(f"/api/v1/jobs/{job_id or _new_id()}", json=body, params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


def _over(client: TestClient, job_id: str) -> Body:
    """Wait until the job is over."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        shown: Body = client.get(f"/api/v1/jobs/{job_id}", params={"wait": "30"}).json()
        if shown["status"]["state"] in jobs.FINAL:
            return shown
    raise AssertionError(shown)


def test_a_job_runs_and_is_deleted(works: ServeContext, owner: TestClient, digest: str) -> None:
    job_id, body = _new_id(), {"spec": {"argv": ["train.py"], "name": "first"}, "target": "local", "digest": digest}
    shown = _put(owner, body, job_id)
    assert (shown["name"], shown["kind"], shown["warnings"]) == ("first", "local", [])
    assert _put(owner, body, job_id, 200)["id"] == job_id
    other = body | {"spec": {"argv": ["train.py", "--more"]}}
    assert _put(owner, other, job_id, 409)["detail"] == f"there is another job with the id {job_id}"
    over = _over(owner, job_id)
    assert (over["status"]["state"], over["status"]["exit_code"], over["native_id"]) == ("succeeded", 0, job_id)
    assert over["started_at"] <= over["ended_at"]
    (target,) = owner.get("/api/v1/targets").json()
    assert target["answered_at"] == over["status"]["observed_at"]

    described = owner.get(f"/api/v1/jobs/{job_id}/describe").json()
    assert (described["spec"]["argv"], described["spec"]["code"]) == (["train.py"], "")
    assert next(event["event"] for event in described["events"]) == "submitting"
    assert (works.home / "jobs" / job_id / "code/.env.example").exists()  # a copy of the code, hidden files too
    listed = owner.get("/api/v1/jobs", params={"ids": f"{job_id},{_new_id()}"}).json()
    assert [shown["id"] for shown in listed["jobs"]] == [job_id]

    log = works.home / "logs" / f"{job_id}.ndjson"  # which nobody has asked for
    until(lambda: last_mark(str(log)).complete, "the log is complete")
    assert b'"text":"trained\\n"' in log.read_bytes()
    works.spools.remove(job_id)
    workers.complete_logs(works)  # as at a start of a server that was killed before it had read the log
    until(lambda: last_mark(str(log)).complete, "the log is complete again")
    assert owner.delete(f"/api/v1/jobs/{job_id}").status_code == 204
    assert not log.exists()
    assert owner.get(f"/api/v1/jobs/{job_id}").json()["detail"] == f"no job '{job_id}'"
    assert not (works.home / "jobs" / job_id).exists()
    actions = [row["action"] for row in owner.get("/api/v1/audit").json()]
    assert actions[:2] == ["delete", "submit"]


def test_values_of_secrets_are_in_no_record_and_gone_at_the_end(
    works: ServeContext, owner: TestClient, digest: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = f'echo "<$TOKEN>"; while [ ! -e {gate} ]; do sleep 0.05; done'
    body = _command(script, digest, secrets={"TOKEN": "env:HF_TOKEN"}) | {"secrets": {"TOKEN": "hf_abc"}}
    job_id = _put(owner, body)["id"]
    log = works.home / "jobs" / job_id / "logs"
    while not (log.is_dir() and any(b"<hf_abc>" in path.read_bytes() for path in log.iterdir())):
        time.sleep(0.05)
    secret = works.home / "secrets" / job_id / "TOKEN"
    assert (secret.read_text(), secret.stat().st_mode & 0o777) == ("hf_abc", 0o600)
    gate.touch()
    assert _over(owner, job_id)["status"]["state"] == "succeeded"
    assert not secret.parent.exists()
    described = owner.get(f"/api/v1/jobs/{job_id}/describe").json()
    assert described["spec"]["secrets"] == {"TOKEN": "env:HF_TOKEN"}
    shutil.rmtree(log)  # the job has printed it
    files = [path for path in works.home.rglob("*") if path.is_file() and path.suffix != ".ndjson"]
    assert [path for path in files if b"hf_abc" in path.read_bytes()] == []


def test_a_description_has_the_plan_once_the_job_is_submitted(
    context: ServeContext, owner: TestClient, digest: str
) -> None:
    path = f"/api/v1/jobs/{_put(owner, _command('true', digest))['id']}/describe"
    before = owner.get(path).json()
    assert (before["plan"], before["events"], before["exit"]) == (None, [], None)
    job_id = before["job"]["id"]
    submit_row(context, jobs.get(context, job_id))
    after = owner.get(path).json()
    assert after.keys() - before.keys() == {"directory", "options"}
    assert after["directory"] == str(context.home / "jobs" / job_id)
    assert "true" in after["plan"]


def test_a_wait_ends_when_the_job_changes(context: ServeContext, owner: TestClient, digest: str) -> None:
    job_id = _put(owner, _command("true", digest))["id"]
    answers: list[Body] = []

    def wait() -> None:
        answers.append(owner.get(f"/api/v1/jobs/{job_id}", params={"wait": "30"}).json())

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: context.changes.awaited, "the request waits")
    assert answers == []
    jobs.fail(context, jobs.get(context, job_id), "rejected")
    thread.join(20)
    assert [answer["status"]["message"] for answer in answers] == ["rejected"]
    assert not context.changes.awaited


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "of another user"])
def test_two_requests_for_one_job_at_once(
    context: ServeContext, owner: TestClient, digest: str, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    """The second request comes while the first is checked; the job has the secrets of the one that is accepted."""
    body = _command("true", digest, secrets={"T": "env:T"}) | {"secrets": {"T": "the value"}}
    job_id = _new_id()
    with context.database.write() as connection:
        connection.execute(insert(code).values(digest=digest, owner="eve", size=1, sent_at=time.time()))

    def admit_late(*arguments: Any) -> None:
        monkeypatch.setattr("accel.serve.submits.admit", admit)
        admit(*arguments)
        _put(owner, body, job_id)

    monkeypatch.setattr("accel.serve.submits.admit", admit_late)
    if is_same:
        _put(owner, body, job_id, 200)
    else:
        eve = Caller(name="eve", role="owner", token_id="", address="", request_id="")
        request = submits.JobRequest(**(body | {"secrets": {"T": "another value"}}))
        with pytest.raises(Problem, match="there is another job with the id"):
            submits.put_job(job_id, request, eve, context, Response())
    assert [path.name for path in (context.home / "secrets").iterdir()] == [job_id]
    assert (context.home / "secrets" / job_id / "T").read_text() == "the value"


def test_values_that_a_killed_request_has_left_are_replaced(
    context: ServeContext, owner: TestClient, digest: str
) -> None:
    job_id, body = _new_id(), _command("true", digest, secrets={"T": "env:T"}) | {"secrets": {"T": "new"}}
    (context.home / "secrets" / job_id).mkdir()
    (context.home / "secrets" / job_id / "OLD").write_text("old")
    _put(owner, body, job_id)
    assert {path.name: path.read_text() for path in (context.home / "secrets" / job_id).iterdir()} == {"T": "new"}


def test_eight_jobs_are_submitted_at_a_time_and_four_on_a_target(context: ServeContext, owner: TestClient) -> None:
    ids = {target: _add(context, 6, target=target, state="submitting") for target in ("a", "b", "c")}
    submitter = Submitter(context)
    assert [row["id"] for row in submitter._next()] == ids["a"][:4] + ids["b"][:4]
    assert submitter._next() == []
    del submitter._active[ids["a"][0]]  # it has ended; the others of its target have waited longer
    assert [row["id"] for row in submitter._next()] == [ids["a"][4]]
    del submitter._active[ids["b"][0]], submitter._active[ids["b"][1]]
    assert [row["target"] for row in submitter._next()] == ["b", "b"]


def _spec(**fields: object) -> Body:
    return {"spec": {"argv": ["train.py"], **fields}}


@pytest.mark.parametrize(
    ("change", "detail", "where"),
    [
        ({"target": "locl"}, "no target 'locl'; did you mean 'local'? (targets: local)", "body.target"),
        ({"digest": "0" * 64}, f"the code {'0' * 64} was not sent: PATCH /code/DIGEST", "body.digest"),
        ({"traget": "local"}, "body: unknown key 'traget'", "body.traget"),
        (_spec(resources={"gpu": 1}), "body.spec.resources: unknown key 'gpu'", "body.spec.resources.gpu"),
        (_spec(code="/etc"), "spec.code must be '.': upload the code (PATCH /code/DIGEST)", "body.spec.code"),
        (_spec(workdir="a/../../b"), "workdir a/../../b is not inside the code", "body.spec.workdir"),
        (_spec(after=["1k2m"]), "after: the server has no job '1k2m'", "body.spec.after"),
        (_spec(argv=["trian.py"]), "trian.py", ""),
        (_spec(nodes=2), "the local target is one machine; 2 nodes need another target", ""),
        (_spec(cpus=2), "body.spec: unknown key 'cpus'", "body.spec.cpus"),
        (_spec(resources={"cpus": 4096}), "--cpus 4096: this process may use", ""),
        (_spec(options={"cpuu": True}), "did you mean 'cpu'?", ""),
        (_spec(secrets={"T": "env:A"}), "secret T: send its value in `secrets`", "body.secrets"),
        ({"secrets": {"T": "1"}}, "secret T: no secret of the job needs a value", "body.secrets"),
        (_spec(secrets={"T": "secret:a/b"}), "--secret T: the local target reads env:NAME and file:PATH only", ""),
        (_spec(options={"cpu": float("inf")}), "NaN and infinite numbers are not allowed", "body"),
    ],
)
def test_what_is_refused(owner: TestClient, digest: str, change: Body, detail: str, where: str) -> None:
    body = {"spec": {"argv": ["train.py"]}, "target": "local", "digest": digest} | change
    headers = {"Content-Type": "application/json"}
    answer = owner.put(f"/api/v1/jobs/{_new_id()}", content=json.dumps(body), headers=headers)
    problem = answer.json()
    assert answer.status_code == 422, problem
    assert detail in problem["detail"]
    assert "\n" not in problem["detail"]
    assert problem.get("where", "") == where
    assert owner.get("/api/v1/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('{"spec": ' + '{"options": ' * 50_000, 400),
        ('{"spec": {"argv": ["train.py"], "nodes": ' + "9" * 5000 + "}}", 400),
        ("\xff", 400),
        ("x" * 10_000_000, 413),
        ("[]", 422),
        ("", 422),
    ],
)
def test_bodies_that_are_no_request(owner: TestClient, text: str, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    answer = owner.put(f"/api/v1/jobs/{_new_id()}", content=text.encode("latin-1"), headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")


def test_what_the_documentation_says_of_odd_values(owner: TestClient, digest: str) -> None:
    """The last of equal keys counts, `true` is 1, and arguments may hold bytes that are not UTF-8."""
    job_id = _new_id()
    text = (
        '{"target": "x", "target": "local", "digest": "%s", "spec": {"argv": ["train.py", "\\udcff"], "nodes": true}}'
    )
    headers = {"Content-Type": "application/json"}
    answer = owner.put(f"/api/v1/jobs/{job_id}", content=text % digest, headers=headers)
    assert (answer.status_code, answer.json()["nodes"]) == (201, 1)
    described = owner.get(f"/api/v1/jobs/{job_id}/describe").json()
    assert described["spec"]["argv"] == ["train.py", "\udcff"]


def test_a_dry_run_needs_no_code_and_leaves_nothing(owner: TestClient, context: ServeContext) -> None:
    body = {"spec": {"argv": ["train.py"], "secrets": {"T": "env:A"}}, "target": "local"}
    shown = _put(owner, body, status=200, dry_run="true")
    assert "accel" in shown["plan"]
    assert shown["refusals"] == []
    refused = _put(owner, body | {"target": "lab"}, status=200, dry_run="true")
    assert (refused["plan"], refused["refusals"]) == (None, ["no target 'lab' (targets: local)"])
    assert owner.get("/api/v1/jobs").json() == {"jobs": [], "more": False}
    assert list((context.home / "secrets").iterdir()) == []


def test_a_cancel_reaches_a_job_that_runs_and_one_that_was_not_submitted_yet(
    context: ServeContext, owner: TestClient, digest: str
) -> None:
    waiting = _put(owner, _command("sleep 600", digest))["id"]
    assert owner.post(f"/api/v1/jobs/{waiting}/cancel").json()["cancel_asked"] is True
    with working(context):
        over = _over(owner, waiting)
        assert (over["status"]["state"], over["status"]["reason"]) == ("cancelled", "user")
        assert not (context.home / "jobs" / waiting).exists()

        running = _put(owner, _command("sleep 600", digest))["id"]
        assert owner.delete(f"/api/v1/jobs/{running}").status_code == 409
        while owner.get(f"/api/v1/jobs/{running}", params={"wait": "1"}).json()["status"]["state"] != "running":
            time.sleep(0.05)
        for _ in range(2):
            assert owner.post(f"/api/v1/jobs/{running}/cancel").status_code == 202
        assert _over(owner, running)["status"]["state"] == "cancelled"
        assert owner.post(f"/api/v1/jobs/{running}/cancel").json()["status"]["state"] == "cancelled"


def test_a_job_after_one_that_was_not_submitted(context: ServeContext, owner: TestClient, digest: str) -> None:
    first = _put(owner, _command("true", digest))["id"]
    second = _put(owner, _command("true", digest, after=[first]))["id"]
    submit_row(context, jobs.get(context, second))  # the first one has no record yet
    assert jobs.get(context, second)["state"] == "submitting"
    jobs.fail(context, jobs.get(context, first), "rejected")
    submit_row(context, jobs.get(context, second))
    row = jobs.get(context, second)
    assert (row["state"], row["reason"]) == ("failed", "dependency")
    assert row["message"] == f"job {first} was not submitted"


def test_a_page_continues_where_the_last_one_ended(context: ServeContext, owner: TestClient) -> None:
    ids = _add(context, 25, state="failed") + _add(context, 7, state="queued", target="lab")
    seen: list[str] = []
    more = True
    while more:
        query = {"limit": "10", "state": "failed"} | ({"before": seen[-1]} if seen else {})
        page = owner.get("/api/v1/jobs", params=query).json()
        seen += [shown["id"] for shown in page["jobs"]]
        more = page["more"]
    assert seen == ids[24::-1]
    queries = ({"name": "run 1"}, 15), ({"owner": "bob"}, 0), ({"since": "20"}, 5), ({"until": "3"}, 6)
    for chosen, count in (*queries, ({"target": "lab"}, 7)):
        assert len(owner.get("/api/v1/jobs", params=chosen).json()["jobs"]) == count
    assert len(owner.get("/api/v1/jobs", params={"ids": ",".join(ids[:5] * 100)}).json()["jobs"]) == 5
    refused = owner.get("/api/v1/jobs", params={"ids": ",".join(ids[:3] * 167)})
    assert (refused.status_code, refused.json()["detail"]) == (422, "ids: 501 ids; at most 500 are allowed")
    refused = owner.get("/api/v1/jobs", params={"stat": "failed"})
    assert (refused.status_code, refused.json()["detail"]) == (422, "query: unknown key 'stat'")


def test_jobs_that_ended_long_ago_are_removed_with_their_code(
    context: ServeContext, owner: TestClient, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with working(context):
        job_id = _put(owner, _command("true", digest))["id"]
        _over(owner, job_id)
    workers.clean(context)
    assert jobs.get(context, job_id)["state"] == "succeeded"
    object.__setattr__(context.settings, "keep", 3)
    (context.home / "secrets/2nf0000abcd").mkdir()
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 4 * 86_400)
    workers.clean(context)
    assert list((context.home / "jobs").glob("[!.]*")) == list((context.home / "code").iterdir()) == []
    assert list((context.home / "snapshots").glob("*.tar")) == list((context.home / "secrets").iterdir()) == []
    with context.database.read() as connection:
        rows = connection.execute(select(audit.c.user, audit.c.action, audit.c.object).order_by(audit.c.id)).all()
    assert rows[-1] == ("accel serve", "delete", f"job {job_id}")


class TestSeveralUsers:
    @pytest.fixture
    def settings(self, homes: Path) -> Settings:
        target = "{kind: kubernetes, image: train}"
        (homes / "config/accel.yaml").write_text(f"targets: {{lab: {target}, bare: {target}}}\n")
        rules = TargetRules(run_as="service", allow_options=("queue",))
        targets = {"lab": rules, "bare": TargetRules(run_as="service")}
        return Settings(home=str(homes / "home/service"), targets=targets)

    @pytest.fixture
    def user(self, api: Api, owner: TestClient) -> Callable[..., TestClient]:
        def client(name: str, role: str) -> TestClient:
            return api(owner.post("/api/v1/tokens", json={"user": name, "role": role}).json()["token"])

        return client

    def test_each_may_do_what_the_role_allows(
        self, context: ServeContext, user: Callable[..., TestClient], snapshot: Snapshot, owner: TestClient
    ) -> None:
        bob, eve, vic = user("bob", "submitter"), user("eve", "submitter"), user("vic", "viewer")
        body: Body = {"spec": {"argv": ["train.py"]}, "target": "lab", "digest": snapshot.digest}
        assert "was not sent" in _put(bob, body, status=422)["detail"]
        _send(bob, snapshot)
        job_id = _put(bob, body)["id"]
        assert "was not sent" in _put(eve, body, status=422)["detail"]  # a digest gives nobody the code of others
        _put(eve, body, job_id, 409)
        assert _put(vic, body, status=403)["detail"].endswith("requires role submitter; vic is a viewer")
        refused = _put(bob, body | {"spec": {"argv": ["train.py"], "options": {"pod_patch": {}}}}, status=422)
        assert refused["detail"] == "--option pod_patch: target lab lets you set queue"
        row = owner.get("/api/v1/audit").json()[0]
        assert (row["user"], row["action"], row["outcome"]) == ("bob", "PUT", f"refused: {refused['detail']}")
        bare = {"spec": {"argv": ["train.py"], "options": {"queue": "a"}}, "target": "bare"}
        assert _put(bob, body | bare, status=422)["detail"] == "--option queue: target bare lets you set no options"
        for client in (eve, vic):
            assert client.get(f"/api/v1/jobs/{job_id}").json()["owner"] == "bob"
            assert client.post(f"/api/v1/jobs/{job_id}/cancel").status_code == 403
            assert client.delete(f"/api/v1/jobs/{job_id}").status_code == 403
            assert "options" not in client.get(f"/api/v1/jobs/{job_id}/describe").json()
        assert bob.post(f"/api/v1/jobs/{job_id}/cancel").status_code == 202
        assert owner.post(f"/api/v1/jobs/{job_id}/cancel").status_code == 202
        submit_row(context, jobs.get(context, job_id))
        assert owner.delete(f"/api/v1/jobs/{job_id}").status_code == 204


@pytest.mark.parametrize(
    ("count", "kills", "stalls"),
    [(12, 3, 1), pytest.param(200, 50, 30, marks=[pytest.mark.long, pytest.mark.timeout(1200)])],
)
def test_a_killed_server_submits_each_job_once(
    serve: Start, homes: Path, snapshot: Snapshot, count: int, kills: int, stalls: int
) -> None:
    """Submits go on while the server is killed and stopped for moments; each job appends its id to one file."""
    ran = homes / "ran"
    server = serve()
    port = server.url.rpartition(":")[2]
    token = (homes / "home/service/owner-token").read_text().strip()
    client = Client(Server(name="team", url=server.url, token=token))
    send_code(client, snapshot)
    ids = [_new_id() for _ in range(count)]
    random = Random(1)
    killed_after = set(random.sample(range(count), kills))
    stalled_after = set(random.sample(range(count), stalls))
    for number, job_id in enumerate(ids):
        body = _command(f"echo {job_id} >> {ran}", snapshot.digest)
        client.request("PUT", f"/jobs/{job_id}", document=body)
        if number in stalled_after:
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            server.process.send_signal(signal.SIGCONT)
        if number in killed_after:
            time.sleep(random.uniform(0, 0.3))
            server.process.kill()
            server.process.wait()
            server = serve("--port", port)
    deadline = time.monotonic() + 600
    while True:
        listed = client.get("/jobs", {"ids": ",".join(ids)})["jobs"]
        if all(shown["status"]["state"] in jobs.FINAL for shown in listed) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    assert [(shown["id"], shown["status"]) for shown in listed if shown["status"]["state"] != "succeeded"] == []
    assert sorted(ran.read_text().split()) == ids
    server.stop()
