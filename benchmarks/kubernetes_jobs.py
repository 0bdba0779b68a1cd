"""Jobs of two nodes of two ranks on a Kubernetes with kubelets and the training operator on this computer
(`tests/clusters/kubernetes.py`): how long they take beside torchrun in a PyTorchJob by hand, and what waiting for one
transfers beside kubectl.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import yaml

from .kubernetes import BIN, Lab, cluster_lab, name_of
from .measure import WAIT_S, Bar, interleaved, report, until

if TYPE_CHECKING:
    from schedulers import Job

_PROGRAM = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
_TRIES = 3
_OTHERS = 63


def kubernetes_jobs(rounds: int) -> bool:
    """Images are present and no code is uploaded. torchrun's rank 0 may end before the others have left its store, and
    then the job fails: such a run is not counted, and done again."""
    with cluster_lab(nodes=2) as lab:
        if lab is None:
            return False
        job, pytorchjob, torchrun = "accel, Job", "accel, PyTorchJob", "torchrun, PyTorchJob"
        measures = {
            job: partial(_ours, lab, "job"),
            pytorchjob: partial(_ours, lab, "pytorchjob"),
            torchrun: partial(_torchrun, lab),
        }
        seconds = interleaved(measures, rounds)
        bars = [Bar(ours=pytorchjob, base=job, limit=1.3), Bar(ours=pytorchjob, base=torchrun, limit=0.4)]
        return report("kubernetes_jobs", seconds, bars)


def kubernetes_traffic(rounds: int) -> bool:
    """Kilobytes to and from the API server while a PyTorchJob of one pod runs, in a namespace with 63 others that have
    ended."""
    from tests.clusters.kube.control import API_PORT
    from tests.schedulers.kubernetes.relays import Relay

    with cluster_lab(nodes=2) as lab:
        if lab is None:
            return False
        for job in [_submit(lab, "pytorchjob", nodes=1, program="") for _ in range(_OTHERS)]:
            job.wait()
        with Relay(lab.cluster.control.address, API_PORT) as relay:
            config = yaml.safe_load(lab.cluster.kubeconfig(namespace=lab.namespace).read_text())
            config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{relay.port}"
            file = lab.project.parent / "relayed.yaml"
            file.write_text(yaml.safe_dump(config))
            os.environ["KUBECONFIG"] = str(file)

            def carried(command: Callable[[Job], list[str]]) -> float:
                job, before = _submit(lab, "pytorchjob", nodes=1), relay.carried
                subprocess.run(command(job), check=True, stdout=subprocess.DEVNULL)
                return (relay.carried - before) / 1e3

            wait, logs, kubectl = "accel wait, kB", "accel logs -f, kB", "kubectl wait, kB"
            limit = f"--timeout={WAIT_S:g}s"
            measures: dict[str, Callable[[], float]] = {
                wait: partial(carried, lambda job: [str(BIN / "accel"), "wait", job.id]),
                logs: partial(carried, lambda job: [str(BIN / "accel"), "logs", "-f", job.id]),
                kubectl: partial(
                    carried,
                    lambda job: ["kubectl", "wait", f"pytorchjob/{name_of(job)}", "--for=condition=Succeeded", limit],
                ),
            }
            kilobytes = interleaved(measures, rounds)
        bars = [Bar(ours=ours, base=kubectl, limit=6) for ours in (wait, logs)]
        return report("kubernetes_traffic", kilobytes, bars)


def _submit(lab: Lab, workload: str, *, nodes: int = 2, program: str = _PROGRAM) -> Job:
    import schedulers
    from tests.clusters.kubernetes import IMAGE

    return schedulers.submit(
        "python", ["-c", program], entry="command", target="kubernetes", cwd=str(lab.project), nodes=nodes,
        procs_per_node=2, options={"cpu": True, "image": IMAGE, "code": "image", "workload": workload},
    )  # fmt: skip


def _ours(lab: Lab, workload: str) -> float:
    from schedulers import State

    started = time.perf_counter()
    status = _submit(lab, workload).wait()
    taken = time.perf_counter() - started
    if status.state is not State.SUCCEEDED:
        raise SystemExit(f"the {workload} is {status.state.value}: {status.message}")
    return taken


def _torchrun(lab: Lab) -> float:
    for _ in range(_TRIES):
        started = time.perf_counter()
        path = f"{lab.path}/{lab.cluster.apply(_by_hand(), lab.namespace)[0]['metadata']['name']}"
        until(lambda path=path: bool(_ended(lab, path)), "the PyTorchJob has ended")  # type: ignore[misc]
        taken = time.perf_counter() - started
        if "Succeeded" in _ended(lab, path):
            return taken
        print("a PyTorchJob of torchrun has failed, and runs again", file=sys.stderr)
    raise SystemExit(f"a PyTorchJob of torchrun has failed {_TRIES} times")


def _by_hand() -> dict[str, Any]:
    from tests.clusters.kubernetes import IMAGE

    command = ["torchrun", "--no-python", "python", "-c", _PROGRAM]  # how many, and where, the operator's variables say
    container = {"name": "pytorch", "image": IMAGE, "command": command}
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": f"torchrun-{uuid.uuid4().hex[:8]}"},
        "spec": {"nprocPerNode": "2", "pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
    }


def _ended(lab: Lab, path: str) -> set[str]:
    """The conditions of its end, when it has ended."""
    conditions = lab.cluster.client.call("GET", path).get("status", {}).get("conditions") or []
    return {each["type"] for each in conditions if each["status"] == "True"} & {"Succeeded", "Failed"}
