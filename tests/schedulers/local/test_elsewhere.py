"""A job of this home that another machine, or another container, looks at: it is not lost, and nothing touches it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
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
from schedulers.errors import SubmitError
from schedulers.jobs.poll import is_abandoned
from schedulers.jobs.prune import prune
from schedulers.local import job_files
from schedulers.local.job_files import SCHEMA, JobFiles
from schedulers.local.target import LocalOptions, LocalTarget
from schedulers.processes import Identity, boot_id, pid_namespace, space_of
from schedulers.store import atomic_files
from schedulers.store.record import Record
from schedulers.store.store import Store
from schedulers.target import TargetContext
from tests.needs import missing
from tests.waiting import until

from .conftest import Submit, of_job, until_printed

HELD = """
import os, time
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.01)
"""
NO_LOCKS = """
import errno, fcntl, os, sys
def refuse(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
if "schedulers.local.supervisor" in " ".join(sys.orig_argv):
    fcntl.flock = refuse
"""
RUNNING = Status(state=State.RUNNING, observed_at=1.0)
NODE = os.uname().nodename
UNSHARE = "unshare --user --map-root-user".split()
NAMESPACE = [*UNSHARE, *"--pid --fork --mount-proc --kill-child".split()]
CLONE = [*UNSHARE, "--mount", "sh", "-c", 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"']
RENAMED = [*UNSHARE, "--uts", "sh", "-c", 'hostname laptop-at-work && exec "$@"', "sh"]


@pytest.fixture(autouse=True, scope="module")
def namespaces() -> None:
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True)
    if tried.returncode:
        missing(f"a PID namespace ({tried.stderr.strip()})", "run where user namespaces are allowed")


@pytest.fixture
def record(home: Path) -> Record:
    """A job that its record takes for running, before it has a supervisor."""
    store = Store.default()
    spec = JobSpec(argv=("train.py",), code="/project")
    target = LocalTarget(TargetContext(name="local", options=LocalOptions(), jobs=store.jobs))
    job_id = store.new_id()
    record = store.create(job_id, spec, target.plan(spec, job_id), target="local", kind="local", options={})
    record.update(RUNNING, job_id)
    JobFiles(record.directory).write("local/progress.json", json.dumps({"schema": SCHEMA, **RUNNING.to_json()}))
    return record


@contextlib.contextmanager
def supervised(record: Record, boot: str = "") -> Iterator[None]:
    """Hold the job's lock, and end with it free; `boot` stands for the boot of another machine, named gpu07."""
    path = record.directory / "local/supervisor.json"
    with open(path.with_name("supervisor.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(["sleep", "1000"]) as process:
            identity = Identity.of(process.pid)
            assert identity is not None
            JobFiles(record.directory).set_supervisor(identity)
            process.kill()
        if boot:
            document = json.loads(path.read_text())
            document |= {"process": f"{identity.pid} {boot}.1", "node": "gpu07"}
            path.write_text(json.dumps(document))
        yield


@pytest.fixture
def held(submit: Submit) -> Job:
    """A job that runs until the file `go` is there."""
    job = submit(HELD)
    until_printed(job, "ready")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    return job


@pytest.fixture
def clone(tmp_path: Path) -> list[str]:
    """What runs a command on a machine with this one's name and another boot."""
    boot = tmp_path / "boot_id"
    boot.write_text("00000000-0000-4000-8000-000000000000\n")
    return [*CLONE, str(boot)]


def go(job: Job) -> None:
    Path(job.spec.code, "go").touch()


def accel(where: list[str], *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*where, sys.executable, "-m", "accel", *argv], capture_output=True, text=True)


def listed(where: list[str]) -> tuple[str, str]:
    job = json.loads(accel(where, "list", "--json").stdout)["jobs"][0]
    return job["state"], job["warning"] or ""


def test_a_job_is_seen_and_cancelled_from_other_boots_names_and_namespaces(held: Job, clone: list[str]) -> None:
    for where in (NAMESPACE, clone, RENAMED):
        assert listed(where) == ("running", "")
        assert accel(where, "prune", "--keep", "0").stdout == ""
        assert accel(where, "logs", held.id).stdout == "ready\n"
    cancelled = accel(clone, "cancel", held.id)
    assert (cancelled.returncode, held.wait(60).state) == (0, State.CANCELLED), cancelled.stderr
    assert of_job(held) == []


def test_a_queued_job_is_cancelled_from_another_namespace(held: Job, submit: Submit) -> None:
    queued = submit("print('never')", name="queued.py", options={"concurrency": 1})
    first = submit(HELD, name="first.py", options={"concurrency": 1})
    for job in (queued, first):
        until(lambda job=job: job.status().state is not State.SUBMITTING, "its supervisor")  # type: ignore[misc]
    waiting = first if queued.status().state is State.RUNNING else queued
    assert accel(NAMESPACE, "cancel", waiting.id).returncode == 0
    assert waiting.wait(60).state in (State.CANCELLED, State.SUCCEEDED)
    go(held)


def test_a_job_whose_pid_namespace_has_ended_is_lost(home: Path, project: Path) -> None:
    (project / "train.py").write_text(HELD)
    submitted = subprocess.run(
        [*NAMESPACE, sys.executable, "-m", "accel", "submit", "--target", "local", "train.py"],
        cwd=project, capture_output=True, text=True,
    )  # fmt: skip
    job = schedulers.find(submitted.stdout.strip())
    until(lambda: job.status().state.final, "its end")
    assert (job.status().state, job.status().reason) == (State.FAILED, Reason.LOST)
    assert prune(Store.default(), ids=[job.id]).ids == (job.id,)


def test_its_end_is_seen_from_everywhere(held: Job) -> None:
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(line.text for line in held.logs(follow=True)))
    reader.start()
    with subprocess.Popen([*NAMESPACE, sys.executable, "-m", "accel", "wait", held.id]) as waiting:
        go(held)
        assert waiting.wait(60) == 0
    reader.join(60)
    assert lines == ["ready\n"]


def test_a_free_lock_after_another_boot(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof where the directory is on a disk of this machine; nothing where other machines may have it mounted."""
    with supervised(record, boot="another-boot"):
        assert schedulers.find(record.id).status().state is State.RUNNING
    store = Store.default()
    line = (
        f"job {record.id} may still run on gpu07: its lock is free, but this machine may not see the locks of others. "
        f"If that machine is gone: rm {record.directory}/local/supervisor.json"
    )
    with monkeypatch.context() as patch:
        patch.setattr(job_files, "DISKS", set())
        ended = store.create("ended", record.spec(), record.plan(), target="local", kind="local", options={})
        ended.update(RUNNING, "ended")
        (ended.directory / "local").mkdir()
        atomic_files.write_document(f"{ended.path}/exit.json", Status(state=State.SUCCEEDED, exit_code=0).to_json())
        found = [(job.id, job.status.state, job.warning) for job in schedulers.list_jobs() if isinstance(job, Record)]
        assert found == [("ended", State.SUCCEEDED, ""), (record.id, State.RUNNING, line)]
        with pytest.raises(Unreachable, match="may still run on gpu07"):
            schedulers.find(record.id).cancel()
        record.update(Status(state=State.FAILED, reason=Reason.LOST))  # as older versions have recorded
        assert prune(store, ids=[record.id]).kept_reasons == (f"job {record.id} is kept: {line}",)
        subprocess.run(["sh", "-c", line.rpartition(": ")[2]], check=True)
        assert prune(store, ids=[record.id]).ids == (record.id,)


def test_a_free_lock_after_a_restart_on_a_disk_of_this_machine(record: Record) -> None:
    if not job_files.on_disk_of_this_machine(record.directory):
        missing("a disk of this machine for temporary files", "set TMPDIR to a directory on one (ext4, XFS, tmpfs)")
    with supervised(record, boot="another-boot"):
        pass
    status = schedulers.find(record.id).status()
    assert (status.state, status.reason) == (State.FAILED, Reason.LOST)


def test_a_lock_that_is_refused_proves_nothing(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with supervised(record):
        pass
    monkeypatch.setattr(fcntl, "flock", refuse)
    why = JobFiles(record.directory).in_use()
    assert f"may still run on {NODE}: its lock cannot be tested (No locks available)" in why


def test_a_home_without_locks_refuses_local_jobs(
    home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter of the supervisor starts with a flock that is refused."""
    (tmp_path / "sitecustomize.py").write_text(NO_LOCKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (project / "train.py").write_text("")
    with pytest.raises(SubmitError, match=r"file system has no locks .*, which local jobs need. Move ACCEL_HOME"):
        schedulers.submit("train.py", cwd=project)


def test_the_lock_of_a_supervisor_whose_identity_is_damaged_keeps_the_job(record: Record) -> None:
    files = JobFiles(record.directory)
    with supervised(record):
        files.write("local/supervisor.json", "damaged")
        assert files.in_use() == "it still runs"
        assert schedulers.find(record.id).status().state is State.RUNNING
    assert files.in_use() == ""
    [found] = schedulers.list_jobs()
    assert isinstance(found, Record)
    assert (found.status.state, "supervisor.json is damaged" in found.warning) == (State.RUNNING, True)


def test_polls_do_not_keep_a_supervisor_from_its_lock(home: Path, project: Path) -> None:
    polls, over = [0], threading.Event()
    store = Store.default()

    def poll() -> None:
        while not over.is_set():
            for record in store.records():
                JobFiles(record.directory).in_use()
                polls[0] += 1

    (project / "train.py").write_text("")
    pollers = [threading.Thread(target=poll) for _ in range(2)]
    for poller in pollers:
        poller.start()
    try:
        while polls[0] < 1000:
            assert schedulers.submit("train.py", cwd=project).wait(120).state is State.SUCCEEDED
    finally:
        over.set()
        for poller in pollers:
            poller.join()


def test_a_submit_in_another_place_is_not_taken_for_cut_off(record: Record) -> None:
    gone = replace(record, created_at=time.time(), submitter=(NODE, 2**22 + 1))
    assert is_abandoned(gone)
    for space in (space_of("another-boot", NODE, pid_namespace()), space_of(boot_id(), NODE, "1")):
        elsewhere = replace(gone, submitted_from=space)
        assert not is_abandoned(elsewhere)
        assert is_abandoned(replace(elsewhere, created_at=0.0))
