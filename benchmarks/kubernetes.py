"""`accel submit --target kubernetes` beside one call of the official client, and what following costs, on a real API
server with etcd on this computer (`tests/clusters/kubernetes.py`): they share its processors, and their network has no
latency.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .measure import WAIT_S, Bar, difference, interleaved, report, report_limits, until, wall

if TYPE_CHECKING:
    from schedulers import Job
    from tests.clusters.kubernetes import Kubernetes

BIN = Path(sys.executable).parent
SCRIPTS = Path(__file__).parent / "scripts"
JOBS = 20
FOLLOWED_S = 20.0
_ASKED = ("pytorchjobs", "pods", "pods/log", "events")
_OF_OTHERS = ("pytorchjobs", "GET")  # the garbage collector looks for the owners of ConfigMaps
WATCHES = 2  # of a job's object and of its pods

# Nothing starts: what is measured is the way to the API server, and back.
TARGETS = "targets: {lab: {kind: kubernetes, cpu: true, image: example.org/train, suspend: true}}\n"


class Lab:
    """A cluster whose jobs become what the benchmark says, and a project with a target, `lab`."""

    def __init__(self, cluster: Kubernetes, folder: Path) -> None:
        self.cluster = cluster
        self.namespace = cluster.namespace("bench")
        self.project = folder / "project"
        self.project.mkdir()
        (self.project / "accel.yaml").write_text(TARGETS)
        (self.project / "train.py").write_text("print('trained')\n")
        os.environ["ACCEL_HOME"] = str(folder / "home")
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig(namespace=self.namespace))
        self.path = f"/apis/kubeflow.org/v1/namespaces/{self.namespace}/pytorchjobs"

    def submit(self) -> Job:
        import schedulers

        return schedulers.submit("train.py", target="lab", cwd=str(self.project), cpus=1, memory_gb=1)

    def manifest(self) -> dict[str, Any]:
        """A job as accel makes it."""
        job = self.submit()
        made = self.cluster.client.call("GET", f"{self.path}/{name_of(job)}")
        kept = {"labels": made["metadata"]["labels"], "annotations": made["metadata"]["annotations"]}
        self.clear()
        return {"apiVersion": made["apiVersion"], "kind": made["kind"], "metadata": kept, "spec": made["spec"]}

    def end(self, job: Job) -> None:
        """The API server has it that the job has succeeded, when this returns."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {
            "type": "Succeeded",
            "status": "True",
            "reason": "Ended",
            "message": "so",
            "lastTransitionTime": when,
        }
        body = {"status": {"conditions": [condition], "replicaStatuses": {}}}
        kind = "application/merge-patch+json"
        self.cluster.client.call("PATCH", f"{self.path}/{name_of(job)}/status", body, content_type=kind)

    def clear(self) -> None:
        self.cluster.client.call("DELETE", self.path)
        until(lambda: not self.left(), "everything is gone")

    def left(self) -> list[str]:
        """The objects that there are in the namespace, but for events."""
        return self.cluster.objects(self.namespace)

    def counted(self, metric: str) -> dict[tuple[str, str], float]:
        """A metric of the API server's, by (resource, verb), of what is asked for in a namespace."""
        text = self.cluster.client.text("/metrics")
        found: dict[tuple[str, str], float] = {}
        for labels, value in re.findall(rf"^{metric}{{([^}}]*)}} (\S+)$", text, re.MULTILINE):
            said = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            if said.get("scope") in ("namespace", "resource"):
                key = said["resource"] + (f"/{said['subresource']}" if said.get("subresource") else ""), said["verb"]
                found[key] = found.get(key, 0) + float(value)
        return found


def kubernetes_submit(rounds: int) -> bool:
    """A job whose code goes into a ConfigMap, and the call that makes the same object: as commands, and in a process
    that has made such calls before."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        body = lab.manifest()
        manifest = lab.project.parent / "manifest.json"
        manifest.write_text(json.dumps(body))
        words = ["submit", "--target", "lab", "--cpus", "1", "--memory", "1", "train.py"]
        ours, raw = "accel submit", "one call of the client, a new process"
        inside, called = "accel.submit() in a process", "one call of the client in a process"
        measures = {
            raw: wall([sys.executable, str(SCRIPTS / "kubernetes_raw.py"), str(manifest)]),
            ours: wall([str(BIN / "accel"), *words], cwd=str(lab.project)),
            called: _timed(_client_call(lab, body)),
            inside: _timed(lab.submit),
        }
        seconds = interleaved(measures, rounds)
        lab.clear()
        difference(seconds, inside, called)
        return report("kubernetes_submit", seconds, [Bar(ours=ours, base=raw, limit=1.2)])


def kubernetes_state(rounds: int) -> bool:
    """From the moment at which the API server has a job's end to the return of `Job.wait`, and of `accel wait`."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        measures = {
            "end to Job.wait()": lambda: _seen(lab, _in_thread),
            "end to accel wait": lambda: _seen(lab, _by_command),
        }
        seconds = interleaved(measures, rounds)
        lab.clear()
        return report_limits("kubernetes_state", seconds, dict.fromkeys(measures, 1.0))


def kubernetes_follow(rounds: int) -> bool:
    """Twenty jobs that are followed at once: the watches that are open, and what is asked beside them; and what is left
    of twenty that were cancelled."""
    with cluster_lab() as lab:
        if lab is None:
            return False
        found: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, value in _followed(lab).items():
                found.setdefault(name, []).append(value)
        return report_limits("kubernetes_follow", found, dict(zip(found, (WATCHES * JOBS, 2, 8, 0.5), strict=True)))


def _followed(lab: Lab) -> dict[str, float]:
    from schedulers.jobs.handle import find_all

    jobs = find_all([lab.submit().id for _ in range(JOBS)])
    threads = [threading.Thread(target=lambda job=job: list(job.logs(follow=True))) for job in jobs]
    for thread in threads:
        thread.start()
    until(lambda: _watches(lab) >= WATCHES * JOBS, "they are followed")
    time.sleep(2)
    watches, before = _watches(lab), lab.counted("apiserver_request_total")
    time.sleep(FOLLOWED_S)
    after = lab.counted("apiserver_request_total")
    asked = {key: after[key] - before.get(key, 0) for key in after if key[0] in _ASKED and key != _OF_OTHERS}
    events = asked.pop(("events", "LIST"), 0.0)
    for job in jobs:
        job.cancel(wait=False)
    for thread in threads:
        thread.join(WAIT_S)
    until(lambda: not [each for each in lab.left() if each.startswith("pods/")], "the pods are gone")
    left = len(lab.left())
    return {
        f"calls: open watches, {JOBS} jobs": watches,
        f"calls in {FOLLOWED_S:g} s beside them": sum(asked.values()),
        f"calls for the events of a waiting job in its first {FOLLOWED_S:g} s": events / JOBS,
        f"calls: objects left of {JOBS} cancelled jobs": float(left),
    }


def _watches(lab: Lab) -> float:
    gauge = lab.counted("apiserver_longrunning_requests")
    return sum(value for key, value in gauge.items() if key[0] in _ASKED and key[1] == "WATCH")


def _client_call(lab: Lab, body: dict[str, Any]) -> Callable[[], object]:
    from kubernetes import client, config

    config.load_kube_config()
    api = client.CustomObjectsApi()
    named = {**body, "metadata": {**body["metadata"], "generateName": "raw-"}}
    return lambda: api.create_namespaced_custom_object("kubeflow.org", "v1", lab.namespace, "pytorchjobs", named)


def _seen(lab: Lab, start: Callable[[Lab, Job], Callable[[], float]]) -> float:
    """Seconds from the answer of the API server to the end of who waits."""
    job = lab.submit()
    ended_at = start(lab, job)
    until(lambda: _watches(lab) >= WATCHES, "somebody waits")
    lab.end(job)
    at = time.perf_counter()
    return max(1e-6, ended_at() - at)


def _in_thread(lab: Lab, job: Job) -> Callable[[], float]:
    from schedulers import find

    seen: list[float] = []

    def wait() -> None:
        waiting = find(job.id)
        waiting.wait(WAIT_S)
        seen.append(time.perf_counter())
        waiting._target().close()  # type: ignore[attr-defined]

    thread = threading.Thread(target=wait)
    thread.start()

    def ended() -> float:
        thread.join(WAIT_S)
        return seen[0]

    return ended


def _by_command(lab: Lab, job: Job) -> Callable[[], float]:
    import subprocess

    process = subprocess.Popen([str(BIN / "accel"), "wait", job.id], stdout=subprocess.DEVNULL)

    def ended() -> float:
        process.wait(WAIT_S)
        return time.perf_counter()

    return ended


def _timed(what: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        what()
        return time.perf_counter() - started

    return measure


def name_of(job: Job) -> str:
    from schedulers.kubernetes.native_id import Native

    return Native.parse(job.native_id or "").name


@contextlib.contextmanager
def cluster_lab(nodes: int = 1) -> Iterator[Lab | None]:
    """A cluster, for as long as this lasts; None, and a line that says why, where there can be none."""
    from tests.clusters.kubernetes import claim, lacks

    absent = lacks()
    if absent is not None:
        print(f"kubernetes: not measured, for {absent[0]} is missing: {absent[1]}", file=sys.stderr)
        yield None
        return
    # A benchmark that is told to end takes its cluster with it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with claim() as cluster, tempfile.TemporaryDirectory() as folder:
            cluster.start(nodes)
            yield Lab(cluster, Path(folder))
    finally:
        signal.signal(signal.SIGTERM, before)
