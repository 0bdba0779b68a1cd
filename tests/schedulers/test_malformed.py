"""Damaged files and malformed answers of hosts: an error of that job or host alone, whatever the JSON."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import io
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accel.cli import exit_status, main
from schedulers.convert import as_integer, as_timestamp, parse_json
from schedulers.errors import SchedulerError, Unreachable
from schedulers.hosts import replies
from schedulers.hosts.errors import RemoteError
from schedulers.hosts.host_list import Host
from schedulers.hosts.session import Result
from schedulers.hosts.transport import Pool
from schedulers.job import JobSpec, State, Status
from schedulers.local.job_files import SCHEMA, JobFiles
from schedulers.node import jobs as host_jobs
from schedulers.processes import Identity
from schedulers.slurm.login import job_ops as host_slurm
from schedulers.store.store import Record, Store
from schedulers.target import Plan

# Text as it stands in a file: json.dumps would refuse some of these numbers, and files hold them all the same.
NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e300", "-1", "0", "1.5", "3", "9" * 400, "253402300800")
SCALARS = st.sampled_from([*NUMBERS, "null", "true", '""', '"x"', '"running"', '"a,b/c"', '"\\udcff"', '"\\u0000"'])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(st.sampled_from(["state", "x", "done", "error", "\udcff"]), inner, max_size=2).map(
            lambda items: "{" + ",".join(f"{json.dumps(key)}:{value}" for key, value in items.items()) + "}"
        )
    ),
    max_leaves=4,
)
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
_HOLE = "a value that is replaced"


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in the document, the whole of it included."""
    yield path
    steps = (
        document.items() if isinstance(document, dict) else enumerate(document if isinstance(document, list) else ())
    )
    for step, value in steps:
        yield from places(value, (*path, step))


def damaged(document: Any) -> st.SearchStrategy[str]:
    """The document as text with one of its values replaced by something else, or removed."""

    def replaced(path: tuple[Any, ...], value: str | None) -> str:
        if not path:
            return value or ""
        changed = copy.deepcopy(document)
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        if value is None:
            del parent[path[-1]]
        else:
            parent[path[-1]] = _HOLE
        return json.dumps(changed).replace(json.dumps(_HOLE), value or "")

    return st.builds(replaced, st.sampled_from(list(places(document))), st.none() | JSON)


@dataclass(frozen=True)
class Home:
    """A store, and `accel list` over it."""

    store: Store

    def create(self, kind: str, native_id: str | None = None, **options: object) -> Record:
        job_id = self.store.new_id()
        plan = Plan(target=kind, kind=kind, job_id=job_id)
        spec = JobSpec(argv=("a.py",), after=("0",))
        record = self.store.create(job_id, spec, plan, target=kind, kind=kind, options=options)
        record.update(Status(state=State.QUEUED, observed_at=1.0), (native_id or "{}").format(job_id))
        return record

    def local(self) -> Record:
        """A running job of the local target, whose supervisor is this process."""
        record = self.create("local")
        files = JobFiles(record.directory)
        identity = Identity.of(os.getpid())
        assert identity is not None
        files.set_supervisor(identity)
        fcntl.flock(os.open(record.directory / "local/supervisor.lock", os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
        status = Status(state=State.RUNNING, message="training", observed_at=time.time())
        progress = {"schema": SCHEMA, **status.to_json()}
        files.write("local/progress.json", json.dumps(progress))
        (files.logs / "launch.jsonl").write_text(
            '{"event": "attempt", "attempt": 1}\n{"event": "failure", "failure": {"rank": 0, "exit_code": 1}}\n'
        )
        return record

    def list(self) -> dict[str, dict[str, Any]]:
        """What `accel list` shows, by job, after checking that it shows every job, in numbers that JSON has."""
        out = io.StringIO()
        env = {"ACCEL_HOME": str(self.store.home), "ACCEL_CONFIG_HOME": str(self.store.home / "none")}
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            for name, value in env.items():
                patch.setenv(name, value)
            assert main(["list"]) == exit_status.OK  # dates in words
            out.seek(0)
            out.truncate()
            assert main(["list", "--json"]) == exit_status.OK
        return {job["id"]: job for job in parse_json(out.getvalue())["jobs"]}


@pytest.fixture(scope="module")
def module_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    return Home(Store(tmp_path_factory.mktemp("malformed") / "home"))


def check_damage(home: Home, data: st.DataObject, file: str, line: int | None = None) -> None:
    """One value of one file of one job is damaged: the other job, of the same target, is polled all the same."""
    for job_id in home.store.ids():
        home.store._delete(job_id)
    broken, whole = home.local(), home.local()
    path = broken.directory / file
    lines = path.read_text().splitlines() if line is not None else [path.read_text()]
    at = line or 0
    lines[at] = data.draw(damaged(json.loads(lines[at])), label=file)
    path.write_text("\n".join(lines) + "\n")
    listed = home.list()
    assert listed.keys() == {broken.id, whole.id}
    assert (listed[whole.id]["state"], listed[whole.id]["message"]) == ("running", "training")
    assert listed[whole.id]["warning"] == ""


FILES = [("target.json", None), ("local/supervisor.json", None), ("local/progress.json", None),
         ("logs/launch.jsonl", 0), ("logs/launch.jsonl", 1)]  # fmt: skip


@pytest.mark.parametrize(("file", "line"), [("events.jsonl", 0), ("events.jsonl", 1), *FILES])
@QUICK
@given(data=st.data())
def test_damage_to_one_value_of_a_job_is_an_error_of_that_job_alone(
    module_home: Home, file: str, line: int | None, data: st.DataObject
) -> None:
    check_damage(module_home, data, file, line)


RESULT = {"schema": 1, **Status(state=State.FAILED, exit_code=3, observed_at=5.0).to_json()}


@QUICK
@given(text=damaged(RESULT))
def test_a_damaged_result_is_an_error_of_its_job_alone(module_home: Home, text: str) -> None:
    for job_id in module_home.store.ids():
        module_home.store._delete(job_id)
    broken, whole = module_home.local(), module_home.local()
    (broken.directory / "exit.json").write_text(text)
    listed = module_home.list()
    assert listed.keys() == {broken.id, whole.id}
    assert listed[whole.id]["state"] == "running"


@pytest.mark.parametrize("native_id", ["", "../../x", "a\0b", "x" * 5000, "ü,b/", "h/"])
@pytest.mark.parametrize("kind", ["local", "ssh", "slurm", "kubernetes"])
def test_a_native_id_that_is_none_is_an_error_of_its_job_alone(tmp_path: Path, kind: str, native_id: str) -> None:
    home = Home(Store(tmp_path / "home"))
    whole, broken = home.local(), home.create(kind, native_id or " ")
    listed = home.list()
    assert listed.keys() == {broken.id, whole.id}
    assert listed[whole.id]["warning"] == ""


class Told(Pool):
    """Hosts that answer every program with the same bytes: `h1` well, `h2` as it was told to."""

    lines: Mapping[str, bytes] = {}

    def remote(self, host: Host | str) -> Any:
        return _Remote(host if isinstance(host, Host) else Host(name=host))


@dataclass(frozen=True)
class _Remote:
    host: Host

    @property
    def name(self) -> str:
        return self.host.name

    def run(self, argv: object, **options: object) -> Result:
        return Result(0, Told.lines[self.host.name], b"")


SSH = {
    "done": [{"known": True, "alive": True, "state": {"phase": "running", "attempt": 1, "members": []}, "exit": None}]
}
ENDED = {"done": [{"known": True, "alive": False, "state": {"phase": "ended", "members": [1]}, "exit": {
    "state": "failed", "fenced": True, "exit_code": 2, "attempt": 0, "message": "x", "observed_at": 1.0}}]}  # fmt: skip
SAID = {"state": "RUNNING", "reason": "", "code": "", "derived": "", "restarts": 0}
JOB: dict[str, Any] = {"exit": None, "said": SAID, "searched": False, "attempt": 0, "started": True, "foreign": False,
                       "words": ""}  # fmt: skip
SLURM: dict[str, Any] = {"done": [{"jobs": [JOB], "unreachable": None, "accounting": True, "age_s": 0.5}]}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, dict[str, Record]]]:
    home = Home(Store(tmp_path_factory.mktemp("hosts") / "home"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("schedulers.hosts.jobs.status.Pool", Told)
        patch.setattr("schedulers.hosts.transport.Pool", Told)
        yield home, {}


@pytest.mark.parametrize("whole", [SSH, ENDED, SLURM], ids=["ssh", "ssh-ended", "slurm"])
@QUICK
@given(data=st.data())
def test_a_host_that_answers_something_else_is_an_error_of_that_host_alone(
    hosts: tuple[Home, dict[str, Record]], whole: dict[str, Any], data: st.DataObject
) -> None:
    home, _ = hosts
    for job_id in home.store.ids():
        home.store._delete(job_id)
    if whole is SLURM:
        good, bad = (home.create("slurm", f"{number}/{{}}", login=f"h{number}") for number in (1, 2))
    else:
        good, bad = (home.create("ssh", f"h{number}/{{}}", hosts=f"h{number}") for number in (1, 2))
    answer = json.dumps(SLURM if whole is SLURM else SSH).encode()
    line = data.draw(damaged(whole) | JSON | st.sampled_from(["", "Welcome!", '{"done": []}', "[[]]"]), label="answer")
    Told.lines = {"h1": answer + b"\n", "h2": line.encode("utf-8", "surrogateescape") + b"\n"}
    listed = home.list()
    assert listed.keys() == {good.id, bad.id}
    assert (listed[good.id]["state"], listed[good.id]["warning"]) == ("running", "")


def test_every_operation_of_the_hosts_programs_has_a_type() -> None:
    assert replies.JOBS.keys() == host_jobs.OPERATIONS.keys()
    assert replies.SLURM.keys() == host_slurm.OPERATIONS.keys()


STATUS = [{"op": "status", "job": "a"}]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Welcome to h1!", "its reply is not JSON: Welcome to h1!"),
        ('{"done": []}', "its reply has 0 results for 1 requests"),
        ("[[]]", "its reply is malformed: Expected `object`, got `array`"),
        ('{"done": [{"known": 1, "alive": true, "state": 0, "exit": 0}]}', "Expected `bool`, got `int` - at `$.known`"),
        ('{"done": [1e999]}', "its reply is not JSON"),
        ('{"error": "no room"}', "h1: no room"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(line: str, problem: str) -> None:
    with pytest.raises(RemoteError) as raised:
        replies.decode_done(line, STATUS, replies.JOBS, "h1")
    assert str(raised.value).startswith("h1: ")
    assert problem in str(raised.value)


def test_what_an_answer_holds_beyond_its_type_reaches_nobody() -> None:
    """`Said(**answer["said"])`, for one, would be a TypeError."""
    told = {**SLURM["done"][0], "jobs": [{**JOB, "said": {**SAID, "new": 1}, "new": 1}], "new": 1}
    line = json.dumps({"done": [told], "new": 1})
    assert replies.decode_done(line, STATUS, replies.SLURM, "h1") == SLURM["done"]


def test_a_program_that_could_not_ask_says_so() -> None:
    with pytest.raises(Unreachable, match="h1: squeue does not answer"):
        replies.decode_done('{"error": "squeue does not answer", "unreachable": true}', STATUS, replies.JOBS, "h1")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "1e999", "-1e999", "[" * 100_000, '{"a"', b"\xff"])
def test_json_that_is_none_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # of whatever the wording
        parse_json(text)


@pytest.mark.parametrize("value", [-1, 1e300, 253_402_300_800, 10**400, True, None, "1", [1], float("nan")])
def test_what_is_no_time_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^at is .* not a time in seconds since 1970$"):
        as_timestamp(value, "at")


@pytest.mark.parametrize("value", [-1, 1.0, 2**54, True, None, "1"])
def test_what_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^attempt is .* not a whole number of 0 or more$"):
        as_integer(value, "attempt")


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    record = Home(Store(tmp_path / "home")).create("local")
    before = (record.directory / "events.jsonl").read_bytes()
    with pytest.raises(SchedulerError, match="observed_at is inf"):
        record.update(Status(state=State.RUNNING, observed_at=float("inf")))
    with pytest.raises(SchedulerError, match="finite numbers"):
        record.append("note", value=float("nan"))
    assert (record.directory / "events.jsonl").read_bytes() == before
