"""A job of this home that another machine, or another container, looks at: it is not lost, and nothing touches it."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import schedulers
from schedulers import Job, JobSpec, Reason, State, Status, Unreachable
from schedulers.jobs.poll import cut_off
from schedulers.jobs.prune import prune
from schedulers.local.job_files import JobFiles, progress_document
from schedulers.local.target import LocalOptions, LocalTarget
from schedulers.processes import Identity, Place
from schedulers.store.record import Record
from schedulers.store.store import Store
from schedulers.target import TargetContext
from tests.needs import missing
from tests.waiting import until

from .conftest import Submit, until_printed

HELD = """
import os, time
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"""
PROCESSES = ("supervisor", "launcher")
RUNNING = Status(state=State.RUNNING, observed_at=1.0)
NODE = os.uname().nodename
GPU07 = "local jobs of node gpu07 can be polled and cancelled only there"
NAMESPACE = "unshare --user --map-root-user --pid --fork --mount-proc --kill-child".split()


@pytest.fixture
def record(home: Path) -> Iterator[Record]:
    """A running job as its record has it, whose supervisor and launcher are one process that sleeps."""
    store = Store.default()
    spec = JobSpec(argv=("train.py",), code="/project")
    target = LocalTarget(TargetContext(name="local", options=LocalOptions(), jobs=store.jobs))
    job_id = store.new_id()
    record = store.create(job_id, spec, target.plan(spec, job_id), target="local", kind="local", options={})
    record.update(RUNNING, job_id)
    with subprocess.Popen(["sleep", "1000"]) as process:
        identity = Identity.of(process.pid)
        assert identity is not None
        for who in PROCESSES:
            JobFiles(record.directory).set_identity(who, identity)
        JobFiles(record.directory).write("local/progress.json", json.dumps(progress_document(RUNNING)))
        yield record
        process.kill()


@pytest.fixture
def held(submit: Submit) -> Job:
    """A job that runs until the file `go` is there."""
    job = submit(HELD)
    until_printed(job, "ready")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    return job


def move(record: Record, **place: str) -> None:
    """Rewrite where the job's processes are; nothing else of them changes."""
    for who in PROCESSES:
        path = record.directory / f"local/{who}.json"
        document = json.loads(path.read_text())
        for key in ("node", "boot", "pid_namespace"):
            document.pop(key, None)
        path.write_text(json.dumps(document | place))


def go(job: Job) -> None:
    Path(job.spec.code, "go").touch()


def elsewhere(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*NAMESPACE, sys.executable, "-m", "accel", *argv], capture_output=True, text=True)


def test_another_pid_namespace_changes_nothing(held: Job) -> None:
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    if tried.returncode:
        missing(f"a PID namespace ({tried.stderr.strip()})", "run where user namespaces are allowed")
    node = f"node {NODE} in another PID namespace"
    listed = json.loads(elsewhere("list", "--json").stdout)["jobs"][0]
    assert (listed["state"], listed["observed_at"]) == ("running", held.record.status.observed_at)
    assert node in listed["warning"]
    cancelled = elsewhere("cancel", held.id)
    assert (cancelled.returncode, cancelled.stdout) == (1, "")
    assert node in cancelled.stderr
    assert "already ended" not in cancelled.stderr
    assert elsewhere("prune", "--keep", "0").stdout == ""
    assert elsewhere("logs", held.id).stdout == "ready\n"
    assert held.status().state is State.RUNNING
    go(held)
    assert held.wait().state is State.SUCCEEDED


def test_its_end_is_seen_from_everywhere(held: Job) -> None:
    move(held.record, node="gpu07")
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(line.text for line in held.logs(follow=True)))
    reader.start()
    go(held)
    assert schedulers.find(held.id).wait(60).state is State.SUCCEEDED
    reader.join(60)
    assert lines == ["ready\n"]


def test_one_job_of_another_node_does_not_spoil_the_poll_of_others(record: Record) -> None:
    store = Store.default()
    move(record, node="gpu07")
    spec = record.spec()
    ended = store.create("ended", spec, record.plan(), target="local", kind="local", options={})
    ended.update(RUNNING, "ended")
    (ended.directory / "local").mkdir()
    ended.write_exit(Status(state=State.SUCCEEDED, exit_code=0).to_json())
    found = [(job.id, job.status.state, job.warning) for job in schedulers.list_jobs() if isinstance(job, Record)]
    assert found == [("ended", State.SUCCEEDED, ""), (record.id, State.RUNNING, GPU07)]
    job = schedulers.find(record.id)
    assert job.status() == RUNNING
    assert job.record.warning == GPU07
    with pytest.raises(Unreachable, match="only there"):
        job.cancel()


def test_prune_keeps_what_may_still_run(record: Record) -> None:
    """Older versions have recorded jobs as lost that run elsewhere."""
    store = Store.default()
    move(record, node="gpu07")
    assert prune(store, keep=0).ids == ()
    record.update(Status(state=State.FAILED, reason=Reason.LOST))
    line = f"job {record.id} is kept: it may still run on node gpu07"
    assert (prune(store, keep=0).ids, prune(store, ids=[record.id]).left) == ((), (line,))
    move(record, node=NODE)
    line = f"job {record.id} is kept: it still runs"
    assert prune(store, keep=0).left == (line,)
    (record.directory / "events.jsonl").write_text("damaged")
    assert prune(store, ids=[record.id]).left == (line,)
    record.write_exit({"state": "failed", "reason": "lost"})
    assert prune(store, ids=[record.id]).ids == (record.id,)


def test_the_lock_of_a_supervisor_whose_identity_is_damaged_keeps_the_job(record: Record) -> None:
    files = JobFiles(record.directory)
    for who in PROCESSES:
        files.write(f"local/{who}.json", "damaged")
    assert files.in_use() == ""
    with open(record.directory / "local/supervisor.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert files.in_use() == "it still runs"
    [listed] = schedulers.list_jobs()
    assert isinstance(listed, Record)
    assert (listed.status, "supervisor.json is damaged" in listed.warning) == (RUNNING, True)


def test_a_record_of_an_older_version_is_judged_on_the_host_of_its_submit(record: Record) -> None:
    move(record)
    job = schedulers.find(record.id)
    assert (job.status().state, job.record.warning) == (State.RUNNING, "")
    events = record.directory / "events.jsonl"
    events.write_text(events.read_text().replace(f'"host":"{NODE}"', '"host":"gpu07"'))
    assert (job.status().state, job.record.warning) == (State.RUNNING, GPU07)


def test_lost_is_proved_on_the_same_node(record: Record) -> None:
    supervisor = JobFiles(record.directory).supervisor()
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    assert supervisor.wait(60)
    job = schedulers.find(record.id)
    boot = Place.here().boot
    for place in ({"node": "gpu07"}, {"node": NODE, "boot": boot, "pid_namespace": "1"} if boot else {"node": "x"}):
        move(record, **place)
        assert job.status() == RUNNING
        assert job.record.warning
    move(record, node=NODE, boot="another", pid_namespace="1")
    assert (job.status().state, job.status().reason) == (State.FAILED, Reason.LOST)


def test_a_submit_in_another_place_is_not_taken_for_cut_off(record: Record) -> None:
    gone = replace(record, created_at=time.time(), submitter=(NODE, 2**22 + 1))
    assert cut_off(gone)
    for place in (Place("gpu07"), Place(NODE, Place.here().boot, "1")):
        elsewhere = replace(gone, submitted_from=place)
        assert cut_off(elsewhere) is (place.hidden_from(Place.here()) == "")
        assert cut_off(replace(elsewhere, created_at=0.0))
