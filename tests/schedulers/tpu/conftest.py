"""A slice of the tests' Google Cloud, and jobs on it; nothing of them is left when a test ends: its hosts go."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, State
from tests.clusters.fixtures import _tpu, tpu
from tests.clusters.tpu import PARENT, ZONE, Tpu
from tests.needs import missing
from tests.waiting import until

__all__ = ["_tpu", "tpu"]

ROOT = Path(__file__).parents[3]
CREATED: dict[str, Any] = {"name": None, "accelerator_type": "v4-16", "version": "tpu-ubuntu2204-base"}
Submit = Callable[..., Job]


@pytest.fixture(autouse=True)
def _fabric(request: pytest.FixtureRequest) -> None:
    if "tpu" in request.fixturenames:
        try:
            import fabric  # noqa: F401
        except ImportError:
            missing("fabric", "pip install 'accel-launch[ssh]'")


def make_slice(tpu: Tpu, name: str, kind: str = "v4-16", **more: Any) -> None:
    """A slice of two hosts, that is READY."""
    node = {"accelerator_type": kind, "runtime_version": "tpu-ubuntu2204-base", **more}
    with tpu.client() as client:
        client.create_node(parent=PARENT, node_id=name, node=node).result()


def target_options(tpu: Tpu, **more: Any) -> dict[str, Any]:
    return {
        "zone": ZONE, "name": "pod1", "ssh_config": str(tpu.hosts.config), "python": sys.executable, "cpu": True,
        "heartbeat_s": 5, "start_timeout_s": 20, "disk_gb": 0.001, **more,
    }  # fmt: skip


def printed(job: Job) -> list[tuple[int, str]]:
    return sorted((line.rank, line.text) for line in job.logs() if line.rank is not None)


def runs(job: Job) -> None:
    """Polls the job, as a client that waits does, until a rank has printed `up`."""
    until(lambda: job.status().state is State.RUNNING and (0, "up\n") in printed(job), "the job runs", 90)


def empty(tpu: Tpu) -> None:
    """No slice and no queued resource is left."""
    until(lambda: not tpu.nodes() and not tpu.queued(), "all slices are deleted", 90)


def deleted_by(tpu: Tpu) -> set[str]:
    return {call.caller for method in ("DeleteNode", "DeleteQueuedResource") for call in tpu.calls(method)}


@pytest.fixture
def submit(home: Path, project: Path, tpu: Tpu) -> Iterator[Submit]:
    """Submits the text of a shell script to the slice `pod1`, which is there unless a test has made another."""
    jobs: list[Job] = []

    def submit(text: str, *args: str, **given: Any) -> Job:
        if not tpu.nodes() and "accelerator_type" not in given.get("options", {}):
            make_slice(tpu, "pod1")
        (project / "job.sh").write_text(f"{text}\n")
        options = target_options(tpu, **given.pop("options", {}))
        settings = {"entry": "command", "procs_per_node": 1, "grace_s": 2.0, **given}
        env = {"PYTHONPATH": str(ROOT), **settings.pop("env", {})}
        job = schedulers.submit(
            "sh", ["job.sh", *args], target="tpu", cwd=project, env=env, options=options, **settings
        )
        jobs.append(job)
        return job

    yield submit
    for job in jobs:
        target: Any = job.waiting_target()
        if target is not None:
            target.close()
