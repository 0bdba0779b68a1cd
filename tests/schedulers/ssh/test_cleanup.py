"""What hosts keep goes with the jobs that it was kept for, and by its age; never what a job still uses."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedulers import Job, SpecError, State, find, list_jobs
from schedulers.hosts.host_list import parse_hosts
from schedulers.hosts.jobs.cleanup import clear, clear_jobs
from schedulers.hosts.jobs.native_id import Native
from schedulers.hosts.jobs.status import Hosts
from schedulers.hosts.remote_files import Blob, Files
from schedulers.hosts.transport import Pool
from schedulers.jobs.prune import prune
from schedulers.ssh.target import SshOptions
from schedulers.store.store import Store
from tests.clusters.ssh import SshHosts
from tests.waiting import until

from .conftest import Submit, host_options, job_files, nothing_is_left

DAY_S = 86400.0


@pytest.fixture
def pool(ssh_hosts: SshHosts) -> Iterator[Pool]:
    with Pool(config=str(ssh_hosts.config)) as made:
        yield made


def top(hosts: SshHosts, node: str = "node1") -> Path:
    return hosts.home(node) / ".accel"


def age(path: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(path, (then, then))


def clear_old(pool: Pool, *jobs: str, days: float = 30, python: str = "python3") -> dict[str, str]:
    return dict(clear(pool.remote("node1"), root="~/.accel", python=python, unused_s=days * DAY_S, jobs=jobs))


def test_pruning_a_job_removes_it_from_its_hosts(submit: Submit, ssh_hosts: SshHosts) -> None:
    odd = "mkdir -p shut/inner && touch shut/inner/file && chmod 0500 shut/inner && chmod 0 shut"
    over = submit(odd, hosts="node1,node2")
    assert over.wait(60).state is State.SUCCEEDED
    live = submit('while [ ! -e "$HOME/enough" ]; do sleep 0.1; done', hosts="node1,node2")
    until(lambda: live.status().state is State.RUNNING, "it runs")
    assert prune(Store.default(), keep=0, dry_run=True).ids == (over.id,)
    assert job_files(ssh_hosts, "node1", over.id).exists()
    pruned = prune(Store.default(), keep=0)
    assert (pruned.ids, pruned.kept_reasons) == ((over.id,), ())
    for node in ("node1", "node2"):
        assert [path.name for path in (top(ssh_hosts, node) / "jobs").iterdir()] == [live.id]
        (ssh_hosts.home(node) / "enough").touch()
    assert live.wait(60).state is State.SUCCEEDED


def test_a_host_that_cannot_be_asked_is_named_and_stops_nothing(
    submit: Submit, ssh_hosts: SshHosts, home: Path
) -> None:
    jobs = [submit("true", hosts="node1,node2") for _ in range(2)]
    for job in jobs:
        assert job.wait(60).state is State.SUCCEEDED
    nothing_is_left(ssh_hosts)
    ssh_hosts["node2"].kill()
    said = subprocess.run(
        [sys.executable, "-m", "accel", "prune", "--keep", "0"], capture_output=True, text=True, timeout=100
    )
    assert said.returncode == 0, said.stderr
    assert sorted(said.stdout.split()) == sorted(job.id for job in jobs)
    lines = [line for line in said.stderr.splitlines() if "node2" in line]
    assert len(lines) == 1
    assert lines[0].endswith("; data of 2 jobs not deleted")
    assert list_jobs(refresh=False) == []
    assert not list((top(ssh_hosts) / "jobs").iterdir())
    assert len(list((top(ssh_hosts, "node2") / "jobs").iterdir())) == 2


def test_a_job_of_another_machine_is_removed_from_its_hosts_only_when_it_is_named(
    submit: Submit, ssh_hosts: SshHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("true")
    assert job.wait(60).state is State.SUCCEEDED
    options = host_options(ssh_hosts) | {"hosts": "node1"}
    for named in (None, [job.id]):
        monkeypatch.setenv("ACCEL_HOME", str(tmp_path / f"elsewhere-{named}"))
        assert find(job.id, target="ssh", options=options).wait(60).state is State.SUCCEEDED
        pruned = prune(Store.default(), ids=named) if named else prune(Store.default(), keep=0)
        assert (pruned.ids, pruned.kept_reasons) == ((job.id,), ())
        assert job_files(ssh_hosts, "node1", job.id).exists() is (named is None)


def test_a_job_that_is_still_supervised_somewhere_is_left_there(submit: Submit, ssh_hosts: SshHosts) -> None:
    job = submit('while [ ! -e "$HOME/enough" ]; do sleep 0.1; done')
    until(lambda: job.status().state is State.RUNNING, "it runs")
    hosts = Hosts(SshOptions(ssh_config=str(ssh_hosts.config)))
    native = Native(job_id=job.id, hosts=tuple(parse_hosts("node1,node3")))
    left = clear_jobs(hosts, [native])
    assert left == [f"node1: not removed there: {job.id} (its supervisor still runs)"]
    hosts.close()
    assert job.status().state is State.RUNNING
    finish(job, ssh_hosts)


def finish(job: Job, hosts: SshHosts) -> None:
    for node in hosts.names:
        (hosts.home(node) / "enough").touch()
    assert job.wait(60).state is State.SUCCEEDED


def test_old_contents_go_and_used_ones_stay(pool: Pool, ssh_hosts: SshHosts) -> None:
    end = bytes(1024)  # of a tar file, whatever follows
    blobs = [Blob.of(end + bytes([number])) for number in range(4)]
    files = Files(pool.remote("node1"))
    for blob in blobs:
        files.unpack(blob, blob.digest)
    where = top(ssh_hosts) / "blobs"
    for blob in blobs[:3]:
        age(where / blob.digest, 31)
    (where / ".x.part").touch()
    age(where / ".x.part", 2)
    assert files.unpack(blobs[1], "again") is False  # that is a use
    clear_old(pool)
    assert {path.name for path in where.iterdir()} == {blobs[1].digest, blobs[3].digest}
    age(where / blobs[3].digest, 31)
    new = Blob.of(end + b"new")
    Files(pool.remote("node1"), unused_s=30 * DAY_S).unpack(new, "new")  # a submit of new code
    assert {path.name for path in where.iterdir()} == {blobs[1].digest, new.digest}


def environment(directory: Path, name: str, days: float | None) -> Path:
    made = directory / "envs" / (name * 64)
    (made / "bin").mkdir(parents=True)
    for end in (".log", ".lock"):
        made.with_name(made.name + end).touch()
    if days is None:
        age(made, 31)
    else:
        (made / ".whole").touch()
        age(made / ".whole", days)
    return made


def job_that_uses(directory: Path, job: str, made: Path, *, ended: float | None) -> None:
    own = directory / "jobs" / job
    own.mkdir(parents=True)
    (own / "settings.json").write_text(json.dumps({"command": [str(made / "bin/python"), "launch"]}))
    if ended is not None:
        (own / "exit.json").touch()
        age(own / "exit.json", ended)


def test_environments_that_nobody_needs_go(pool: Pool, ssh_hosts: SshHosts) -> None:
    there = top(ssh_hosts)
    old, fresh, half, running, lately, held = (environment(there, *given) for given in [
        ("a", 31), ("b", 29), ("c", None), ("d", 90), ("e", 90), ("f", 90)
    ])  # fmt: skip
    job_that_uses(there, "runs", running, ended=None)
    job_that_uses(there, "ran", lately, ended=3)
    job_that_uses(there, "ran-long-ago", old, ended=40)
    (there / "jobs/odd").mkdir()
    (there / "jobs/odd/settings.json").write_text("[]")
    lock = f"{ssh_hosts.box}/home/root/.accel/envs/{held.name}.lock"
    holding = ssh_hosts["node1"].argv("flock", lock, "sh", "-c", "echo has it; cat")
    holder = subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"has it\n"
    clear_old(pool)
    assert {path for path in (there / "envs").iterdir() if path.is_dir()} == {fresh, running, lately, held}
    assert not old.with_name(old.name + ".lock").exists()
    assert not half.exists()
    holder.communicate()
    assert holder.returncode == 0


def test_what_a_killed_clearing_left_is_removed_by_the_next(pool: Pool, ssh_hosts: SshHosts) -> None:
    jobs = top(ssh_hosts) / "jobs"
    (jobs / ".old-1-abc/code").mkdir(parents=True)
    (jobs / "2.claims").mkdir()
    assert clear_old(pool, "2", "../x", "none") == {"../x": "not a job id"}
    assert not list(jobs.iterdir())
    assert stat.S_IMODE(jobs.stat().st_mode) & 0o022 == 0


@pytest.mark.parametrize("days", [0.5, 0, -1, float("nan")])
def test_unused_days_are_checked(submit: Submit, days: float) -> None:
    with pytest.raises(SpecError, match="unused_days must be 1 or more, not"):
        submit("true", hosts="node1,node2", options={"unused_days": days})
