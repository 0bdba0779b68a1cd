"""Training on a real API server: what two pods of two ranks learn is what one process learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import schedulers
from schedulers import State
from schedulers.job import JobSpec, Retry
from schedulers.jobs.handle import submit_spec
from schedulers.kubernetes.native_id import Native
from tests.clusters.kubernetes import IMAGE, ROOT, Kubernetes
from tests.digits import write_in_float64
from tests.needs import package
from tests.waiting import until

from .conftest import printed


def test_digits_on_two_pods_of_two_ranks(namespace: str, home: Path, project: Path) -> None:
    package("torch")
    package("sklearn")
    write_in_float64(project)
    job = schedulers.submit(
        "train.py", ["--epochs", "2"], cwd=project, target="kubernetes", nodes=2, procs_per_node=2,
        options={"cpu": True, "image": IMAGE},
    )  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    one = [sys.executable, "train.py", "--epochs", "2"]
    alone = subprocess.run(one, cwd=project, env=env, capture_output=True, text=True, check=True)
    status = job.wait(300)
    assert status.state is State.SUCCEEDED, (status, printed(job))
    texts = ("".join(line.text for line in job.logs(ranks=[0])), alone.stdout)
    found = [float(text.rpartition("test accuracy: ")[2]) for text in texts]
    assert found[0] == found[1]
    assert found[0] > 0.8


def test_a_world_that_may_grow(
    kubernetes: Kubernetes, namespace: str, home: Path, project: Path, tmp_path: Path
) -> None:
    """A pod that is evicted is followed by another, which joins the one that stayed."""
    text = 'echo "world $WORLD_SIZE"; until [ -e /told/enough ]; do sleep 0.2; done'
    kubernetes.share(tmp_path / "told")
    options = {
        "cpu": True, "image": IMAGE, "code": "image", "pod_security": "privileged",
        "volumes": [{"mount": "/told", "host_path": str(tmp_path / "told")}],
    }  # fmt: skip
    spec = JobSpec(
        argv=("sh", "-c", text), entry="command", nodes=1, max_nodes=2, procs_per_node=1, grace_s=1.0,
        code=str(project), options=options, retry=Retry(max_restarts=1),
    )  # fmt: skip
    job = submit_spec(spec, "kubernetes", start=project)
    first, second = (f"{Native.parse(job.native_id or '').name}-worker-{index}" for index in (0, 1))
    until(lambda: printed(job).count("world 2") == 2, "both are there")
    kubernetes.displace(namespace, second)
    until(lambda: kubernetes.logs(namespace, first).count("world 2") == 2, "another one has joined", 180)
    (tmp_path / "told/enough").touch()
    status = job.wait(120)
    assert status.state is State.SUCCEEDED, status
