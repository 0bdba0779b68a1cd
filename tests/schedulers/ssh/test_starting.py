"""What a submit reports of each job when a host is lost, or refuses, before all supervisors are started."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from schedulers.errors import SchedulerError, Unreachable
from schedulers.hosts.errors import HostUnreachable, RemoteError
from schedulers.hosts.facts import Facts, Gpus, HostRequirements, TimedFacts
from schedulers.hosts.host_list import Host
from schedulers.hosts.jobs import placement
from schedulers.hosts.jobs.native_id import Native
from schedulers.hosts.jobs.placement import Node, Placement, PlacementError, place
from schedulers.hosts.jobs.status import Hosts, Reply
from schedulers.hosts.jobs.submit import StartError, cancel, ship, start
from schedulers.hosts.preflight import Report, Row
from schedulers.hosts.remote_files import Blob
from schedulers.hosts.transport import Outcome
from schedulers.node import jobs
from schedulers.ssh.target import SshOptions

FACTS = Facts(
    name="h", machine="m", user="me", home="/home/me", python="3.12.0", executable="/usr/bin/python3", packages={},
    disk="/", disk_free=1, disk_writable=True, shm_free=1, processes=-1, files=-1, gpus=Gpus(count=0, how=""),
    addresses=(), time=0.0,
)  # fmt: skip
LOST, REFUSED = HostUnreachable("b", "connection lost"), RemoteError("b", "cannot listen on port 2")


class Answers:
    """Hosts of which some fail to do anything, or to start one job. `shared`: what has the directory of a job.

    `taken`: the host whose first job finds no free port.
    """

    options, python = SshOptions(), "python3"

    def __init__(
        self,
        errors: Mapping[str, SchedulerError | dict[str, RemoteError]],
        *,
        silent: str = "",
        shared: Mapping[str, list[int]] | None = None,
        taken: str = "",
    ) -> None:
        self._errors = errors
        self._silent, self._shared, self._taken = silent, shared or {}, taken
        self.pool = self
        self.mapped: list[str] = []
        self.new_ids: dict[str, str] = {}

    def query(self, asked: Mapping[Host, Sequence[Mapping[str, object]]]) -> dict[Host, Outcome[Reply]]:
        def done(host: Host, number: int, step: Mapping[str, object]) -> object:
            if step["op"] == "port":
                return None if host.name == self._taken and number == 0 else 1
            if step["op"] == "id":
                return f"id of {host.name}"
            return self._shared.get(str(step["job"]), [])

        return {
            host: Outcome(host, error=LOST)
            if host.name == self._silent
            else Outcome(host, value=Reply([done(host, number, step) for number, step in enumerate(steps)], b""))
            for host, steps in asked.items()
        }

    def map(self, _: Callable[..., object], hosts: Iterable[Host]) -> list[Outcome[dict[str, RemoteError]]]:
        answers = {host: self._errors.get(host.name, {}) for host in hosts}
        self.mapped.append("".join(host.name for host in answers))
        return [
            Outcome(host, value=answer) if isinstance(answer, dict) else Outcome(host, error=answer)
            for host, answer in answers.items()
        ]


def job(job_id: str, *names: str) -> Placement:
    nodes = tuple(Node(host=Host(name=name), facts=FACTS, address=name, port=1) for name in names)
    return Placement(job_id=job_id, members=nodes, spares=(), master_port=None, claim="c")


def started(
    errors: dict[str, SchedulerError | dict[str, RemoteError]], *placements: Placement
) -> dict[str, tuple[type[SchedulerError], str, str | None]]:
    failed = start(cast(Hosts, Answers(errors)), placements, secrets={})
    return {job_id: (type(error), str(error), getattr(error, "native_id", None)) for job_id, error in failed.items()}


SWEEP = (job("one", "a"), job("two", "b"), job("three", "b"), job("four", "a", "b"))
NONE = "no host runs the job"


def test_a_host_that_cannot_start_anything_fails_its_own_jobs() -> None:
    assert started({"b": REFUSED}, *SWEEP) == {
        "two": (StartError, f"{REFUSED}; {NONE}", "b/two"),
        "three": (StartError, f"{REFUSED}; {NONE}", "b/three"),
        "four": (StartError, f"{REFUSED}; {NONE}", "a,b/four"),  # what was started of it is to be cancelled
    }


def test_a_host_that_cannot_start_one_job_starts_the_others() -> None:
    assert started({"b": {"two": REFUSED}}, *SWEEP) == {"two": (StartError, f"{REFUSED}; {NONE}", "b/two")}


def test_a_host_that_is_lost_may_run_the_jobs_that_it_has_alone() -> None:
    assert started({"b": LOST}, *SWEEP) == {
        "two": (Unreachable, str(LOST), None),
        "three": (Unreachable, str(LOST), None),
        "four": (StartError, f"{LOST}; {NONE}", "a,b/four"),
    }
    both = started({"a": REFUSED, "b": LOST}, job("one", "a", "b"))
    assert both == {"one": (StartError, f"{REFUSED}; {LOST}; {NONE}", "a,b/one")}


CODE = Blob(digest="0" * 64, size=0, source=b"")
HALF = f"{REFUSED}; nothing was started"
SHARED = "a and b share the directory ~/.accel: name one that each host has for itself (root: in accel.yaml)"


@pytest.mark.parametrize(
    ("hosts", "failed", "mapped"),
    [
        (Answers({}), {}, ["ab"]),
        # What was sent of the failed ones is removed.
        (Answers({"b": REFUSED}), {"two": HALF, "three": HALF, "four": HALF}, ["ab", "ba"]),
        (
            Answers({}, silent="b"),
            dict.fromkeys(("two", "three", "four"), f"{LOST}; nothing was started"),
            ["a", "ba"],
        ),
        (Answers({}, shared={"four": [1]}), {"four": f"{SHARED}; nothing was started"}, ["ab", "ab"]),
    ],
)
def test_a_host_that_cannot_be_sent_anything_fails_its_own_jobs(
    hosts: Answers, failed: dict[str, str], mapped: list[str]
) -> None:
    answers = ship(cast(Hosts, hosts), {}, SWEEP, code=CODE)
    assert {job_id: str(error) for job_id, error in answers.items()} == failed
    assert {type(error) for error in answers.values()} <= {StartError}
    assert hosts.mapped == mapped


SIZE = {"gpus": None, "cpus": None, "procs_per_node": 1, "cpu_only": True, "concurrency": 2}
FULL = "d: none of its ports * is free; name others (ports: in accel.yaml); nothing was started"


@pytest.mark.parametrize(
    ("hosts", "nodes", "failed", "mapped"),
    [
        (Answers({}, silent="b"), 1, {"two": f"{LOST}; nothing was started"}, ["b"]),
        (Answers({}, silent="b"), 2, dict.fromkeys(("one", "three"), f"{LOST}; nothing was started"), ["ab"]),
        (Answers({}, taken="d"), 2, {"two": FULL}, ["cd"]),
        (Answers({}), 2, {}, []),
    ],
)
def test_a_host_that_is_lost_after_its_examination_fails_its_own_jobs(
    hosts: Answers, nodes: int, failed: dict[str, str], mapped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does one without a free port. What was claimed for the failed jobs is removed."""
    named = [Host(name=name) for name in "abcd"]
    seen = TimedFacts(facts=FACTS, requested_at=0.0, replied_at=0.0)
    rows = tuple(Row(host=host, facts=seen, verdict="ok") for host in named)
    report = Report(
        rows=rows, findings=(), usable=tuple(named), master="a", port=29500, attempts={},
        leads={host: host.name for host in named},
    )  # fmt: skip
    monkeypatch.setattr(placement, "examine_hosts", lambda *_, **__: report)
    job_ids = ["one", "two", "three", "four"]
    placements, refused = place(cast(Hosts, hosts), job_ids, named, nodes, SIZE, requirements=HostRequirements())
    assert [placement.job_id for placement in placements] == [job_id for job_id in job_ids if job_id not in failed]
    assert {
        job_id: re.sub(r"ports [0-9, ]+ is", "ports * is", str(error)) for job_id, error in refused.items()
    } == failed
    assert {type(error) for error in refused.values()} <= {PlacementError}
    assert hosts.mapped == mapped


def test_all_that_start() -> None:
    assert started({}, *SWEEP) == {}


@pytest.mark.parametrize(
    ("answers", "answered"),
    [((True, True), True), ((True, LOST), True), ((False, LOST), False), ((False, False), True), ((LOST, LOST), False)],
)
def test_a_cancel_is_answered_by_a_host_that_has_the_job(
    answers: tuple[bool | SchedulerError, ...], answered: bool
) -> None:
    class Asked:
        def query(self, asked: dict[Host, object]) -> dict[Host, Outcome[Reply]]:
            return {
                host: Outcome(host, error=answer)
                if isinstance(answer, SchedulerError)
                else Outcome(host, value=Reply([answer], b""))
                for host, answer in zip(asked, answers, strict=True)
            }

    with contextlib.nullcontext() if answered else pytest.raises(Unreachable, match="connection lost"):
        cancel(cast(Hosts, Asked()), Native.of("one", [Host(name="a"), Host(name="b")]))


def test_a_host_where_no_supervisor_was_started_does_not_have_the_job(tmp_path: Path) -> None:
    directory = tmp_path / "jobs/one"
    directory.mkdir(parents=True)
    assert not jobs.cancel(str(tmp_path), {"job": "one"}, [])
    for name in ("state.json", "exit.json"):
        (directory / name).write_text("{}")
    assert jobs.cancel(str(tmp_path), {"job": "one"}, [])
