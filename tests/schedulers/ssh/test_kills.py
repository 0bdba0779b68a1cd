"""A client that is killed at any moment of its submit leaves a whole job or none, and its store finds out which."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schedulers import Job, State, find, list_jobs
from tests.clusters.ssh import SshHosts
from tests.marks import long

from .conftest import ROOT, close, host_options, nothing_is_left

AT_ONCE = 4
NODES = 3
STILL_S = 90.0  # the queue of jobs has come to a standstill where nothing is new of any job for so long
SEED = "ACCEL_TEST_SEED"  # in the environment: the moments of an earlier run
PROGRAM = """
import sys, schedulers
job = schedulers.submit("./job.sh", target="ssh", entry="command", cwd=sys.argv[1], **eval(sys.argv[2]))
"""


@pytest.fixture
def client(ssh_hosts: SshHosts, home: Path, project: Path) -> Iterator[Any]:
    """Starts a client that submits a job of this name."""
    (project / "job.sh").write_text('#!/bin/sh\ntouch "$HOME/ran-$ACCEL_JOB_ID"\n')
    (project / "job.sh").chmod(0o755)
    options = host_options(ssh_hosts) | {"hosts": f"node[1-{NODES}]", "start_timeout_s": 10, "heartbeat_s": 30}
    given = {"nodes": NODES, "procs_per_node": 1, "options": options, "env": {"PYTHONPATH": str(ROOT)}}

    def start(name: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", PROGRAM, str(project), repr({**given, "name": name})]
        return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)

    yield start
    for machine in ssh_hosts.machines:
        machine.kill()


def ran_on(hosts: SshHosts, job_id: str) -> list[str]:
    return [name for name in hosts.names if (hosts.home(name) / f"ran-{job_id}").exists()]


@pytest.mark.parametrize("moments", [3, *long(20)])
def test_a_client_that_is_killed_at_random_moments_leaves_a_whole_job_or_none(
    client: Any, ssh_hosts: SshHosts, moments: int
) -> None:
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED}={seed}")  # shown when the test fails
    chance = random.Random(seed)
    began = time.monotonic()
    assert client("whole").wait(120) == 0
    whole_s = time.monotonic() - began
    delays = [chance.uniform(0, 1.1 * whole_s) for _ in range(moments)]

    def cut_off(number: int) -> None:
        process = client(f"cut-{number}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(delays[number])
        process.kill()
        process.wait()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(cut_off, range(moments)))
    jobs = [find(record.id) for record in list_jobs(refresh=False)]
    wait_for_all(jobs)
    outcomes = {job.record.name: (job.status().state, len(ran_on(ssh_hosts, job.id))) for job in jobs}
    for job in jobs:
        close(job)
    assert outcomes.pop("whole") == (State.SUCCEEDED, NODES)
    odd = {
        name: found for name, found in outcomes.items() if found not in ((State.SUCCEEDED, NODES), (State.FAILED, 0))
    }
    assert not odd, (seed, {name: (delays[int(name.removeprefix("cut-"))], found) for name, found in odd.items()})
    nothing_is_left(ssh_hosts)


def wait_for_all(jobs: Sequence[Job]) -> None:
    """Wait until all have ended, however many wait for the hosts' few processors; fail when the queue stands still."""
    before: list[tuple[Any, ...]] = []
    changed = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while True:
            statuses = list(pool.map(Job.status, jobs))
            if all(status.state.final for status in statuses):
                return
            now = [(status.state, status.attempt, status.message) for status in statuses]
            if now != before:
                before, changed = now, time.monotonic()
            still = [(job.record.name, job.id, status) for job, status in zip(jobs, statuses, strict=True)]
            assert time.monotonic() - changed < STILL_S, still
            time.sleep(0.2)
