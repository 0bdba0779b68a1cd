"""The command line against a server: the same commands as for a target of one's own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, update

import accel
import schedulers
from accel.cli import main
from accel.serve.tables import token
from schedulers.config.named_targets import resolve_target
from schedulers.errors import SpecError
from schedulers.job import JobSpec, State
from schedulers.jobs.handle import find
from schedulers.service.client import Client
from schedulers.store.store import Record, Store
from tests.waiting import until

from .conftest import Team
from .test_server import Start

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def project(team: Team, homes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project of a user who has logged in to the server, on a computer without jobs. The current directory."""
    team.log_in(homes / "config")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (homes / "project").mkdir()
    monkeypatch.chdir(homes / "project")
    yield homes / "project"
    for record in Store.default().records():  # of a test that failed
        if isinstance(record, Record) and not record.status.state.final:
            find(record.id).request_cancel()


@pytest.fixture
def run(project: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that exits with `code`; returns what it has printed on both streams."""

    def run(*argv: str, code: int = 0) -> tuple[str, str]:
        capfd.readouterr()
        done = main(argv)
        out, err = capfd.readouterr()
        assert done == code, err
        return out, err

    return run


def test_from_submit_to_describe(run: Run, project: Path, homes: Path, team: Team) -> None:
    (project / "train.py").write_text("import sys; print('trained', sys.argv[1:])")
    out, err = run("submit", "--target", "team/local", "--memory", "1G", "train.py", "--lr", "1e-3")
    job_id = out.strip()
    assert f"job {job_id} submitted to team/local; follow it: accel logs -f {job_id}" in err
    assert "accel: warning: team: memory_gb is not enforced on the local target" in err
    assert run("wait", job_id)[0] == f"{job_id}\tsucceeded\n"
    assert run("logs", "@last")[0] == "trained ['--lr', '1e-3']\n"
    status = json.loads(run("status", "--json", job_id)[0])
    shown = {key: status[key] for key in ("target", "kind", "native_id", "state", "exit_code", "attempt")}
    assert shown == {
        "target": "team/local", "kind": "service", "native_id": job_id, "state": "succeeded", "exit_code": 0,
        "attempt": 0,
    }  # fmt: skip
    assert run("list")[0].split("\t")[:4] == [job_id, "train", "succeeded", "team/local"]
    described = json.loads(run("describe", "--json", job_id)[0])
    spec = {"argv": ["train.py", "--lr", "1e-3"], "name": "train", "resources": {"memory_gb": 1.0}}
    sent = {"spec": spec, "target": "local"}
    assert json.loads(described["plan"]["files"]["service/request.json"]) == sent
    assert described["backend"].startswith("server=")
    assert described["options"] == {"url": team.url, "target": "local"}
    # The job has one id on both sides, and this computer stores no token beside it.
    assert Store(team.home).record(job_id).status.state is State.SUCCEEDED
    assert not any(team.token.encode() in path.read_bytes() for path in (homes / "home").rglob("*") if path.is_file())


def test_following_gives_the_jobs_bytes_and_its_exit_code(
    project: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = b"a\r\n50%\r\xff\x00\xc3\xa9 no end"
    (project / "train.py").write_text(f"import os, sys; os.write(1, {data!r}); sys.exit(3)")
    capfdbinary.readouterr()
    assert main(["submit", "--follow", "train.py"]) == 3  # to the target of `accel context`
    out, err = capfdbinary.readouterr()
    assert out == data
    assert b"submitted to team/local" in err
    assert b"failed (exit code 3)" in err


def test_a_job_is_followed_until_it_is_cancelled(project: Path) -> None:
    (project / "train.py").write_text("import time; print('ready', flush=True); time.sleep(600)")
    job = schedulers.submit("train.py", target="team/local", grace_s=5)
    lines = job.logs(follow=True)
    assert next(lines).text == "ready\n"
    until(lambda: job.status().state is State.RUNNING, "the server has polled its target")
    with pytest.raises(TimeoutError):
        job.wait(0.1)
    assert job.cancel().state is State.CANCELLED
    assert job.cancel().state is State.CANCELLED
    assert [line.text for line in lines if line.rank == 0] == []


def test_lines_before_a_cursor_are_left_out(run: Run, project: Path) -> None:
    (project / "train.py").write_text("import os\nfor n in range(5): print('rank', os.environ['RANK'], n)")
    run("submit", "--follow", "--procs-per-node", "2", "train.py")
    lines = [json.loads(line) for line in run("logs", "--json", "--rank", "1", "@last")[0].splitlines()]
    assert [line["text"] for line in lines] == [f"rank 1 {n}\n" for n in range(5)]
    later = run("logs", "--since", lines[2]["cursor"], "--rank", "1", "@last")[0]
    assert later == "rank 1 3\nrank 1 4\n"
    tail = run("logs", "--tail", "1", "--no-prefix", "@last")[0].splitlines()
    assert {"rank 0 4", "rank 1 4"} <= set(tail)
    assert not {"rank 0 3", "rank 1 3"} & set(tail)
    assert run("logs", "--since", "1h", "--rank", "0", "--tail", "1", "@last")[0] == "rank 0 4\n"
    assert "not a cursor of this log: log=x" in run("logs", "--since", "log=x", "@last", code=2)[1]


def test_a_sweep_sends_its_code_once(run: Run, project: Path, team: Team) -> None:
    (project / "train.py").write_text("import sys; print(*sys.argv[1:])")
    out, err = run("submit", "--sweep", "lr=1,2", "--sweep", "seed=3,4", "train.py")
    ids = out.split()
    assert "4 jobs submitted to team/local" in err
    run("wait", *ids)
    assert [run("logs", job_id)[0] for job_id in ids] == [
        f"--lr {lr} --seed {seed}\n" for lr in (1, 2) for seed in (3, 4)
    ]
    digests = {(Store.default().jobs / job_id / "service/digest").read_text() for job_id in ids}
    assert len(digests) == 1


def test_after_names_a_job_of_the_server(run: Run, project: Path) -> None:
    (project / "train.py").write_text("import sys; sys.exit(3)")
    first = run("submit", "train.py")[0].strip()
    second = run("submit", "--after", "@last", "train.py")[0].strip()
    run("wait", second, code=143)
    assert f"job {first} (--after) failed" in json.loads(run("status", "--json", second)[0])["message"]
    local = run("submit", "--target", "local", "train.py")[0].strip()
    assert f"team: after: the server has no job '{local}'" in run("submit", "--after", local, "train.py", code=2)[1]
    run("wait", local, code=3)


def test_secrets_are_read_here_and_stored_nowhere(
    run: Run, project: Path, homes: Path, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cret")
    (homes / "key").write_text("k3y\n")
    (project / "train.py").write_text("import os; print(os.environ['TOKEN'][::-1], os.environ['KEY'][::-1])")
    secrets = ("--secret", "TOKEN=env:HF_TOKEN", "--secret", f"KEY=file:{homes / 'key'}")
    assert run("submit", "--follow", *secrets, "train.py")[0] == "terc3s_fh y3k\n"
    stored = [path for top in (homes / "home", team.home) for path in top.rglob("*") if path.is_file()]
    assert not [path for path in stored if b"hf_s3cret" in path.read_bytes()]
    monkeypatch.delenv("HF_TOKEN")
    assert "secret TOKEN: HF_TOKEN is not set" in run("submit", *secrets, "train.py", code=2)[1]


def test_a_dry_run(run: Run, project: Path, homes: Path, team: Team) -> None:
    (project / "train.py").write_text("")
    plan = run("submit", "--dry-run", "--option", "concurrency=2", "train.py")[0]
    assert f"$ PUT {team.url}/api/v1/jobs/dry-run\n" in plan
    assert '"concurrency": 2' in plan
    assert "team/local would accept the job" in run("submit", "--dry-run=server", "train.py")[1]
    assert "--option nope: the local target has no such option" in run(
        "submit", "--dry-run=server", "--option", "nope=1", "train.py", code=1
    )[1]  # fmt: skip
    assert not (homes / "home/jobs").exists()


def test_a_target_of_a_server_in_a_file(run: Run, project: Path, team: Team) -> None:
    (project / "train.py").write_text("print('trained')")
    (project / "accel.yaml").write_text(
        f"targets:\n  lab: {{kind: service, url: {team.url}/, target: small, project: vision, snapshot: true}}\n"
    )
    assert run("submit", "--target", "lab", "--follow", "train.py")[0] == "trained\n"
    described = json.loads(run("describe", "--json", "@last")[0])
    request = json.loads(described["plan"]["files"]["service/request.json"])
    assert (request["target"], request["project"]) == ("small", "vision")
    assert request["spec"]["options"] == {"snapshot": True}
    (project / "accel.yaml").write_text(
        "targets:\n  lab: {kind: service, url: http://jobs.example.org, target: small}\n"
    )
    err = run("submit", "--target", "lab", "train.py", code=2)[1]
    assert "target lab: url: http://jobs.example.org: a token is sent over https only" in err


def test_the_targets_of_the_current_server_are_listed(run: Run, team: Team, homes: Path) -> None:
    rows = [line.split("\t") for line in run("targets")[0].splitlines()]
    assert [row[:3] for row in rows if row[0].startswith("team/")] == [
        ["team/local", "service", "server team (local)"], ["team/small", "service", "server team (local)"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target", "team"], "team is a server: give one of its targets, as in team/lab (accel targets)"),
        (["--target", "tema/local"], "no server 'tema'; did you mean 'team'? (servers: team)"),
        (["--target", "server/local"], "no server 'server'"),
        (["--target", "service"], "target service: missing 'url', 'target'"),
    ],
)
def test_mistakes_that_are_seen_here(run: Run, project: Path, argv: list[str], message: str) -> None:
    (project / "train.py").write_text("")
    assert message in run("submit", *argv, "train.py", code=2)[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target", "team/locla"], "team: no target 'locla'; did you mean 'local'? (targets: small, local)"),
        (["--nodes", "2"], "team: the local target is one machine; 2 nodes need another target"),
        (["--nodes", "1:2"], "jobs of a local target have one size"),
        (["--gpus", "99"], "team: --gpus 99: this machine has"),
        (["--option", "nope=1"], "team: --option nope: the local target has no such option"),
        (["--secret", "T=secret:a/b"], "team: --secret T: the local target reads env:NAME and file:PATH only"),
    ],
)
def test_refusals_of_the_server(run: Run, project: Path, argv: list[str], message: str) -> None:
    (project / "train.py").write_text("")
    assert message in run("submit", *argv, "train.py", code=2)[1]
    assert message in run("submit", *argv, "--sweep", "lr=1,2", "train.py", code=2)[1]
    assert run("list")[0] == ""


def test_code_that_is_too_large(serve: Start, homes: Path, run: Run, project: Path) -> None:
    (homes / "config/serve.yaml").write_text("max_code: 100 KiB\n")
    Team(serve().url, homes, _owner_token(homes)).log_in(homes / "config")
    (project / "train.py").write_text("")
    (project / "data").write_bytes(os.urandom(200_000))
    err = run("submit", "train.py", code=1)[1]
    assert re.fullmatch(r"accel submit: team: the code has 2\d\d\.\d KiB, at most 100\.0 KiB are allowed\n", err)
    assert run("list")[0].split("\t")[2] == "failed"


def test_jobs_of_two_targets_of_a_server_are_polled_by_one_request(
    run: Run, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "train.py").write_text("import time; time.sleep(600)")
    ids = [run("submit", "--target", f"team/{name}", "train.py")[0].strip() for name in ("local", "small")]
    get, polled = Client.get, list[str]()

    def counted(self: Client, path: str, query: Mapping[str, Any] | None = None, **settings: Any) -> Any:
        if path == "/jobs" and query is not None:
            polled.append(query["ids"])
        return get(self, path, query, **settings)

    monkeypatch.setattr(Client, "get", counted)
    assert len(run("list")[0].splitlines()) == 2
    assert [set(query.split(",")) for query in polled] == [set(ids)]
    # More jobs than one request may name take several.
    polled.clear()
    find(ids[0])._target().poll([f"{number:011}" for number in range(1001)])
    assert [query.count(",") + 1 for query in polled] == [500, 500, 1]
    run("cancel", *ids)


def test_functions_are_refused(project: Path) -> None:
    with pytest.raises(schedulers.SpecError, match=r"target team/local: functions run on local targets"):
        schedulers.submit(print, ("x",), target="team/local")


def test_a_job_from_another_computer(run: Run, project: Path, homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "train.py").write_text("print('hello')")
    job_id = run("submit", "train.py")[0].strip()
    run("wait", job_id)
    monkeypatch.setenv("ACCEL_HOME", str(homes / "other"))
    listed = json.loads(run("list", "--json", "--all", "--target", "team/local")[0])["jobs"]
    listed_job = next(job for job in listed if job["id"] == job_id)
    assert (listed_job["name"], listed_job["state"]) == ("train", "succeeded")
    assert listed_job["owner"]
    with monkeypatch.context() as terminal:
        terminal.setattr("sys.stdout.isatty", lambda: True)
        header, row = run("list", "--limit", "1", "--target", "team/local")[0].splitlines()[:2]
    assert re.search(r"OWNER.*MESSAGE", header)
    assert listed_job["owner"] in row
    elsewhere = run("status", job_id, "--target", "team/small", code=1)[1]
    assert f"job {job_id} of team is on its target local: --target team/local" in elsewhere
    assert json.loads(run("status", job_id, "--target", "team/local", "--json")[0])["state"] == "succeeded"
    assert run("logs", job_id)[0] == "hello\n"
    assert json.loads(run("describe", "--json", job_id)[0])["spec"]["argv"] == ["train.py"]
    unknown = job_id[:-1] + ("0" if job_id[-1] != "0" else "1")
    err = run("status", unknown, "--target", "team/local", code=1)[1]
    assert f"no job {unknown}, here or on target team/local" in err


def test_the_environment_names_the_server(
    run: Run, project: Path, homes: Path, team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    (homes / "config/servers.yaml").unlink()
    monkeypatch.setenv("ACCEL_SERVER", team.url)
    monkeypatch.setenv("ACCEL_TOKEN", team.token)
    (project / "train.py").write_text("print('in CI')")
    assert run("submit", "--target", "server/local", "--follow", "train.py")[0] == "in CI\n"
    assert "server/small" in run("targets")[0]
    monkeypatch.delenv("ACCEL_TOKEN")
    err = run("submit", "--target", "server/local", "train.py", code=2)[1]
    assert f"no token for {team.url}: accel login {team.url}" in err


def test_a_newer_client_names_what_an_older_server_lacks(project: Path, team: Team) -> None:
    (project / "train.py").write_text("")
    resolved = resolve_target("team/local", Store.default().jobs)
    plan = resolved.plan(JobSpec(argv=("train.py",), code=str(project)), Store.default().new_id())
    request = json.loads(plan.files["service/request.json"])
    request["spec"]["elastic"] = True
    newer = dataclasses.replace(plan, files={"service/request.json": json.dumps(request)})
    with pytest.raises(SpecError, match=r"team is accel \S+ and does not know spec.elastic: upgrade it, or leave"):
        resolved.target.submit(newer)
    assert resolved.target.review(newer) == [  # type: ignore[attr-defined]
        f"team is accel {accel.__version__} and does not know spec.elastic: upgrade it, or leave that out"
    ]


def test_a_submit_to_a_silent_server_is_completed_with_the_code_of_that_time(
    serve: Start, homes: Path, run: Run, project: Path
) -> None:
    server = serve()
    Team(server.url, homes, _owner_token(homes)).log_in(homes / "config")
    server.stop()
    (project / "train.py").write_text("print('first')")
    command = [sys.executable, "-m", "accel", "submit", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True)  # a process that has ended when it is completed
    (record,) = Store.default().records()
    assert done.stderr == (
        f"accel submit: team does not answer (connection refused); job {record.id} is kept as submitting, and "
        f"`accel status {record.id}` tries again\n"
    )
    (project / "train.py").write_text("print('second')")
    assert "accel: warning: targets of team are not listed: team does not answer" in run("targets")[1]
    serve("--port", server.url.rpartition(":")[2])
    assert run("status", record.id)
    run("wait", record.id)
    assert run("logs", record.id)[0] == "first\n"
    # The answer of the server was lost, and the job's submit is repeated: it is the same job.
    plan = find(record.id).record.plan()
    assert resolve_target("team/local", Store.default().jobs).target.submit(plan) == record.id


def test_a_log_goes_on_after_the_server_was_killed(serve: Start, homes: Path, project: Path) -> None:
    server = serve()
    Team(server.url, homes, _owner_token(homes)).log_in(homes / "config")
    (project / "train.py").write_text(
        "import itertools, os, time\n"
        f"for n in itertools.takewhile(lambda _: not os.path.exists({str(homes / 'enough')!r}), itertools.count()):\n"
        "    print(n, flush=True)\n"
        "    time.sleep(0.01)\n"
    )
    job = schedulers.submit("train.py", target="team/local")
    lines = job.logs(follow=True)
    texts = [next(lines).text for _ in range(5)]
    server.stop(signal.SIGKILL)
    serve("--port", server.url.rpartition(":")[2])
    texts += [next(lines).text for _ in range(100)]
    (homes / "enough").touch()
    texts += [line.text for line in lines]
    assert texts == [f"{n}\n" for n in range(len(texts))]
    assert job.wait().state is State.SUCCEEDED


def test_tokens_and_roles(serve: Start, homes: Path, run: Run, project: Path) -> None:
    (homes / "config/accel.yaml").write_text("targets: {lab: {kind: kubernetes, image: x}}\n")
    (homes / "config/serve.yaml").write_text("targets: {lab: {run_as: service, allow_options: [queue]}}\n")
    server = serve()
    team = Team(server.url, homes, _owner_token(homes))
    team.log_in(homes / "config")
    (project / "train.py").write_text("")
    (homes / "token").write_text(run("token", "create", "--user", "sam")[0])
    run("login", server.url, "--token-file", str(homes / "token"), "--name", "sam")
    submit = ("submit", "--target", "sam/lab", "--option", "pod_patch={}", "train.py")
    assert "sam: --option pod_patch: target lab lets you set queue" in run(*submit, code=2)[1]
    engine = create_engine(f"sqlite:///{homes / 'home/service/service.db'}")
    with engine.begin() as connection:
        connection.execute(
            update(token).where(token.c.id == (homes / "token").read_text()[6:14]).values(expires_at=1.0)
        )
    engine.dispose()
    err = run(*submit, code=2)[1]
    assert f"sam: the token expired on 1970-01-01: accel login {server.url}" in err
    assert run("list")[0] == ""


def _owner_token(homes: Path) -> str:
    return (homes / "home/service/owner-token").read_text().strip()
