"""Jobs on real hosts, in a store of their own; nothing of them is left when a test ends: the hosts lose their power."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job
from tests.clusters.ssh import SshHosts
from tests.needs import missing

ROOT = Path(__file__).parents[3]
Submit = Callable[..., Job]


@pytest.fixture(autouse=True)
def _fabric(request: pytest.FixtureRequest) -> None:
    if "ssh_hosts" in request.fixturenames:
        try:
            import fabric  # noqa: F401
        except ImportError:
            missing("fabric", "pip install 'accel-launch[ssh]'")


@pytest.fixture
def submit(home: Path, project: Path, ssh_hosts: SshHosts) -> Iterator[Submit]:
    """Submits `script` (the text of a shell script) to node1 … node4 or, with `hosts`, to these."""
    jobs: list[Job] = []

    def submit(text: str, args: tuple[str, ...] = (), *, hosts: str = "node[1-4]", **given: Any) -> Job:
        name = "job.py" if given.get("entry") == "script" else "job.sh"
        write_script(project / name, f"#!/bin/sh\n{text}\n")
        options = host_options(ssh_hosts) | {"hosts": hosts} | given.pop("options", {})
        env = {"PYTHONPATH": str(ROOT), **given.pop("env", {})}
        settings = {"entry": "command", "procs_per_node": 1, "nodes": 2, "grace_s": 2.0, **given}
        job = schedulers.submit(f"./{name}", args, target="ssh", cwd=project, env=env, options=options, **settings)
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        close(job)
    for machine in ssh_hosts.machines:
        machine.kill()


def write_script(path: Path, text: str) -> None:
    """At once: a job that is submitted beside this one may be packing the directory."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o755)
    os.replace(file.name, path)


def close(job: Job) -> None:
    target: Any = job.waiting_target()
    if target is not None:
        target.close()


def host_options(hosts: SshHosts) -> dict[str, Any]:
    return {
        "ssh_config": str(hosts.config),
        "python": sys.executable,
        "cpu": True,
        "heartbeat_s": 5,
        "start_timeout_s": 20,
        "disk_gb": 0.001,
    }


def printed(job: Job, rank: int | None = None) -> str:
    return "".join(line.text for line in job.logs() if line.rank is not None and rank in (None, line.rank))


def job_files(hosts: SshHosts, node: str, job_id: str) -> Path:
    return hosts.home(node) / ".accel/jobs" / job_id


def nothing_is_left(hosts: SshHosts) -> None:
    """No process, supervisor or port of any job, soon, on any host that is on."""
    for machine in hosts.machines:
        if machine.alive():
            deadline = time.monotonic() + 30
            while left := hosts.left(machine.name):
                assert time.monotonic() < deadline, f"on {machine.name}: {left}"
                time.sleep(0.1)
