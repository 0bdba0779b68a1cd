"""One home that two machines share, each in front of a Slurm cluster and an API server of its own.

Both list and prune without pause. Jobs of one end for the other in no way, and no file of a running job is deleted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from schedulers import State
from tests.clusters.kube.control import ControlPlane
from tests.clusters.kubernetes import Kubernetes
from tests.clusters.slurm import Slurm
from tests.schedulers.kubernetes.conftest import Submit as SubmitToKubernetes
from tests.schedulers.kubernetes.conftest import kubernetes, namespace
from tests.schedulers.kubernetes.conftest import submit as submit_to_kubernetes

from .conftest import Submit, until
from .test_backend import other_cluster

__all__ = ["kubernetes", "namespace", "submit_to_kubernetes"]

EACH, ROUNDS = 30, 250
SECOND = "127.0.0.9"  # of the second API server
# Lists and prunes until it is told to end; prints how often, the states, and what it has pruned.
CLIENT = """
import json, sys
from pathlib import Path
from schedulers.jobs.handle import list_jobs
from schedulers.jobs.prune import prune
from schedulers.store.store import Store
rounds, least, over = 0, int(sys.argv[1]), Path(sys.argv[2])
states, pruned = set(), []
while rounds < least or not over.exists():
    states |= {f"{record.kind} {record.status.state.value}" for record in list_jobs()}
    pruned += prune(Store.default(), keep=0).ids
    rounds += 1
    if rounds == least:
        print(json.dumps({"states": sorted(states), "pruned": pruned}), flush=True)
        states, pruned = set(), []
print(json.dumps({"states": sorted(states), "pruned": pruned}), flush=True)
"""


@pytest.fixture
def second(tmp_path: Path, namespace: str) -> Iterator[Path]:
    """A kubeconfig of another API server, which has a namespace of the same name."""
    control = ControlPlane(tmp_path / "second", SECOND)
    control.box.mkdir()
    control.create()
    try:
        control.start_etcd()
        control.start_api()
        client = control.client()
        client.call("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        client.close()
        config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
        cluster = {"server": control.server, "certificate-authority": str(control.authority.certificate)}
        user = {"client-certificate": str(control.admin.certificate), "client-key": str(control.admin.key)}
        config["clusters"][0]["cluster"], config["users"][0]["user"] = cluster, user
        path = tmp_path / "second.yaml"
        path.write_text(yaml.safe_dump(config))
        yield path
    finally:
        control.api.stop()
        control.etcd.stop()


@pytest.mark.long
def test_two_machines_poll_and_prune_the_jobs_of_one(
    slurm: Slurm,
    kubernetes: Kubernetes,
    submit: Submit,
    submit_to_kubernetes: SubmitToKubernetes,
    second: Path,
    tmp_path: Path,
) -> None:
    go, over = tmp_path / "go", tmp_path / "over"
    jobs = [submit(f"while [ ! -e '{go}' ]; do echo up; sleep 1; done") for _ in range(EACH)]
    # Two run; the cluster has no room for the others.
    jobs += [submit_to_kubernetes("sleep 1000") for _ in range(2)]
    jobs += [submit_to_kubernetes("true", cpus=1000) for _ in range(EACH - 2)]
    until(lambda: [job.status().state for job in jobs].count(State.RUNNING) >= 10, "some run", 180)

    argv = [sys.executable, "-c", CLIENT, str(ROUNDS), str(over)]
    there = f"mount --bind '{second}' '{os.environ['KUBECONFIG']}' && exec \"$@\""
    elsewhere = {**os.environ, "PATH": other_cluster(tmp_path / "bin")}
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as here_client,
        subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", there, "sh", *argv], env=elsewhere, stdout=subprocess.PIPE, text=True
        ) as there_client,
    ):
        clients = [client.stdout for client in (here_client, there_client)]
        try:
            reports = [json.loads(stdout.readline()) for stdout in clients if stdout]
            running = ["kubernetes queued", "kubernetes running", "slurm queued", "slurm running"]
            assert all(set(report["states"]) <= set(running) and not report["pruned"] for report in reports), reports
            assert all((job.record.directory / "plan.json").exists() for job in jobs)
            go.touch()
            for job in jobs[EACH:]:
                job.request_cancel()  # the clients delete the records, which `cancel` would poll
            # They end, and the machine in front of their cluster prunes them.
            until(lambda: not any(job.record.directory.exists() for job in jobs), "all are over", 300)
        finally:
            over.touch()
        last = [json.loads(stdout.readline()) for stdout in clients if stdout]
    ended = {"kubernetes cancelled", "slurm succeeded"}
    assert all(set(report["states"]) <= {*running, *ended} for report in last), last
    assert sorted(last[0]["pruned"] + last[1]["pruned"]) == sorted(job.id for job in jobs)
    assert not (tmp_path / "bin/submitted").exists()
