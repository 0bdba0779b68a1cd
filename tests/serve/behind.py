"""A server in front of one of the tests' clusters, for the tests of those."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

import schedulers
from schedulers import Job
from schedulers.config.servers import Server, add_server
from schedulers.job import State

from .conftest import start_server


@contextlib.contextmanager
def served(folder: Path, kind: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Offers a target of that kind as `team/lab` to this process, whose variables the server has too."""
    (folder / "server").mkdir()
    (folder / "server/accel.yaml").write_text(yaml.safe_dump({"targets": {"lab": {"kind": kind, **options}}}))
    env = {**os.environ, "ACCEL_CONFIG_HOME": str(folder / "server"), "ACCEL_HOME": str(folder / "server-home")}
    server = start_server(folder, env)
    try:
        token = (folder / "server-home/service/owner-token").read_text().strip()
        add_server(Server(name="team", url=server.url, token=token))
        yield
    finally:
        server.stop()


def run_through(project: Path, **settings: Any) -> Job:
    """A job of two nodes through `team/lab`: it prints its node's rank, is followed to its end, and has succeeded."""
    (project / "job.py").write_text("import os\nprint('node', os.environ['GROUP_RANK'], flush=True)\n")
    job = schedulers.submit("job.py", target="team/lab", cwd=project, nodes=2, procs_per_node=1, **settings)
    lines = sorted(line.text for line in job.logs(follow=True) if line.rank is not None)
    status = job.status()
    assert status.state is State.SUCCEEDED, status
    assert lines == ["node 0\n", "node 1\n"]
    running = schedulers.submit("sleep", ("600",), entry="command", target="team/lab", cwd=project, nodes=2, **settings)
    assert running.cancel().state is State.CANCELLED
    return job
