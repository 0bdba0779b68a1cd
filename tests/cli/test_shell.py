"""`accel shell` where it cannot be, and what its line is read as; in a cluster: tests/schedulers/kubernetes."""

from __future__ import annotations

import dataclasses
import time

import pytest

from accel.cli import exit_status
from accel.cli.argv import UsageError
from accel.cli.shell import _node
from schedulers import JobSpec, Resources

from .conftest import Accel

SPEC = JobSpec(argv=("train.py",), name="train", nodes=3, code="/code", resources=Resources(gpus=4))


@pytest.mark.parametrize(("rank", "node"), [(None, 0), (0, 0), (3, 0), (4, 1), (11, 2)])
def test_a_rank_is_on_the_node_that_has_so_many(rank: int | None, node: int) -> None:
    assert _node(SPEC, rank, None) == node
    assert _node(dataclasses.replace(SPEC, procs_per_node=4, resources=Resources()), rank, None) == node


@pytest.mark.parametrize(
    ("rank", "node", "message"),
    [
        (12, None, "--rank 12: the job has ranks 0 to 11"),
        (-1, None, "--rank -1: the job has ranks 0 to 11"),
        (None, 3, "--node 3: the job has nodes 0 to 2"),
    ],
)
def test_a_rank_that_there_is_not_names_those_that_there_are(rank: int | None, node: int | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _node(SPEC, rank, node)


def test_the_ranks_of_a_world_that_may_grow_have_no_node() -> None:
    grown = dataclasses.replace(SPEC, max_nodes=5)
    assert _node(grown, None, 4) == 4
    with pytest.raises(UsageError, match="ranks of an elastic job may change nodes: use --node N"):
        _node(grown, 0, None)


def test_a_target_without_shells_names_those_that_have_them(accel: Accel) -> None:
    job = accel("submit", "--no-python", "sleep", "100").strip()
    deadline = time.monotonic() + 60
    while "running" not in accel("status", job):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = accel.finish("shell", job)
    assert (done.returncode, done.stdout) == (exit_status.USAGE, b"")
    message = b"shell is not supported by local targets (supported by: kubernetes, sagemaker)"
    assert done.stderr == b"accel shell: " + message + b"\n"
    accel("cancel", job)
    done = accel.finish("shell", job, "--", "ls", "-l")
    assert done.stderr.decode() == f"accel shell: job {job} has ended (cancelled); a shell needs a running job\n"
