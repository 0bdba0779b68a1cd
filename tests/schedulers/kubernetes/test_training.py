"""Training on a real API server: what two pods of two ranks learn is what one process learns."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import schedulers
from schedulers import State
from schedulers.handle import submit_spec
from schedulers.job import JobSpec
from tests.clusters.kubernetes import ROOT, Kubernetes
from tests.needs import package
from tests.waiting import until

from .conftest import printed

DIGITS = ROOT / "examples/digits/train.py"


def test_digits_on_two_pods_of_two_ranks(namespace: str, home: Path, project: Path) -> None:
    package("torch")
    package("sklearn")
    shutil.copy(DIGITS, project / "train.py")
    job = schedulers.submit(
        "train.py", ["--epochs", "2"], cwd=project, target="kubernetes", nodes=2, procs_per_node=2,
        options={"cpu": True, "image": "example.org/train:1"},
    )  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    one = [sys.executable, "train.py", "--epochs", "2"]
    alone = subprocess.run(one, cwd=project, env=env, capture_output=True, text=True, check=True)
    status = job.wait(300)
    assert status.state is State.SUCCEEDED, (status, printed(job))
    texts = ("".join(line.text for line in job.logs(ranks=[0])), alone.stdout)
    found = [float(text.rpartition("test accuracy: ")[2]) for text in texts]
    assert found[0] == pytest.approx(found[1], abs=2 / 360)
    assert found[0] > 0.8


def test_a_world_that_may_grow(kubernetes: Kubernetes, namespace: str, home: Path, project: Path) -> None:
    """Two pods are asked for, and one is all that there is place for at first."""
    text = 'echo "world $WORLD_SIZE"; while [ "$WORLD_SIZE" = 1 ]; do sleep 0.2; done'
    options = {"cpu": True, "image": "example.org/train:1", "code": "image"}
    spec = JobSpec(
        argv=("sh", "-c", text), entry="command", nodes=1, max_nodes=2, procs_per_node=1, grace_s=1.0,
        code=str(project), options=options,
    )  # fmt: skip
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"}, "spec": {"hard": {"pods": "1"}}}
    kubernetes.apply(quota, namespace)
    job = submit_spec(spec, "kubernetes", start=project)
    until(lambda: "world 1" in printed(job), "one pod begins")
    kubernetes.apply({**quota, "spec": {"hard": {"pods": "2"}}}, namespace)
    until(lambda: printed(job).count("world 2") == 2, "the other one joins")
    status = job.wait(120)
    assert status.state is State.SUCCEEDED, status
