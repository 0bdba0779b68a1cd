"""Jobs of a kubernetes target, from their submit to their end, on a real API server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, State, Unreachable
from schedulers.jobs.prune import prune
from schedulers.store.record import Record
from schedulers.store.store import Store
from tests import macos
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.marks import long
from tests.waiting import until

from .conftest import Submit, made_by, printed, with_quota

WORKLOADS = ("pytorchjob", "jobset", "job", "trainjob")
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("workload", [*WORKLOADS[:2], *long(*WORKLOADS[2:])])
def test_each_kind_of_workload(workload: str, submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("echo node $ACCEL_JOB_ID; cat note.txt", nodes=2, options={"workload": workload, "code": "auto"})
    assert (job.native_id or "").rpartition("/")[0] == f"{workload}/{namespace}/sh-{job.id}/{job.id}"
    status = job.wait(120)
    assert status.state is State.SUCCEEDED, status
    assert printed(job) == f"node {job.id}\ncode\n" * 2
    assert prune(Store.default(), ids=[job.id]).kept_reasons == ()
    until(lambda: made_by(job, kubernetes, namespace) == [], "everything is gone")


def test_a_client_on_macos(namespace: str, home: Path, project: Path, tmp_path: Path) -> None:
    options = {"cpu": True, "image": IMAGE, "code": "auto"}
    given = {"target": "kubernetes", "procs_per_node": 1, "cwd": str(project), "options": options}
    platform, state, text = macos.submit(macos.path(tmp_path / "macos"), ["cat", "note.txt"], given)
    assert (platform, state) == ("darwin", "succeeded")
    assert "code\n" in text


@pytest.mark.parametrize("workload", [WORKLOADS[0], *long(*WORKLOADS[1:])])
def test_a_cancelled_job_leaves_nothing(workload: str, submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit(
        "trap 'echo ending; exit 0' TERM; echo begun; sleep 600 & wait",
        nodes=2,
        options={"workload": workload, "code": "auto"},
    )
    until(lambda: "begun\nbegun\n" in printed(job), "both nodes run")
    status = job.cancel()
    assert (status.state, status.reason) == (State.CANCELLED, Reason.USER)
    until(lambda: made_by(job, kubernetes, namespace) == [], "everything is gone")
    assert job.cancel().state is State.CANCELLED
    assert "begun" in printed(job)


def test_a_job_that_waits_is_cancelled(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("true", options={"node_selector": {"no": "such-node"}})
    until(lambda: "no node fits" in job.status().message, "it waits")
    assert job.status().reason is Reason.NO_CAPACITY
    assert job.cancel().state is State.CANCELLED
    until(lambda: made_by(job, kubernetes, namespace) == [], "everything is gone")


def test_the_cluster_removes_a_job_after_its_ttl(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("true", options={"ttl_s": 5, "code": "auto"})
    assert job.wait(90).state is State.SUCCEEDED
    until(lambda: made_by(job, kubernetes, namespace) == [], "everything is gone")
    assert job.status().state is State.SUCCEEDED


def test_a_job_that_somebody_else_deletes_is_lost(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("sleep 600")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/sh-{job.id}"
    kubernetes.client.call("DELETE", path)
    status = job.wait(60)
    assert (status.state, status.reason, status.native_state) == (State.FAILED, Reason.LOST, "Deleted")
    assert status.message == "its PyTorchJob is gone: it was cancelled from another machine, or somebody deleted it"


def test_a_rank_that_fails_is_named(submit: Submit) -> None:
    job = submit(
        "[ $RANK = 2 ] || sleep 600; echo no more >&2; exit 7", nodes=2, procs_per_node=2, grace_s=1.0, max_restarts=0
    )
    status = job.wait(120)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.EXIT_CODE, 7), status
    assert status.message.startswith("rank 2 on node 1: ")


@pytest.mark.alone
def test_a_pod_that_is_evicted(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("echo begun; sleep 600", options={"workload": "job"})
    until(lambda: "begun" in printed(job), "it runs")
    (pod,) = kubernetes.pods(namespace)
    kubernetes.evict(namespace, pod["metadata"]["name"])
    status = job.wait(60)
    assert (status.state, status.reason) == (State.FAILED, Reason.PREEMPTED), status
    assert status.message.startswith("node 0: its pod was evicted: The node was low on resource: ephemeral-storage.")


@pytest.mark.parametrize(
    ("program", "given", "who"),
    [
        # A launcher that keeps a time limit stays beside its one rank; that of two ranks imports torch.
        ("exec python -c 'bytearray(4 << 30)'", {"memory_gb": 1.0, "time_limit_s": 600.0}, "rank 0 on node 0: "),
        ("true", {"memory_gb": 0.05, "procs_per_node": 2}, "node 0: "),
    ],
    ids=["a rank", "the launcher"],
)
def test_running_out_of_memory(submit: Submit, program: str, given: dict[str, Any], who: str) -> None:
    job = submit(program, options={"workload": "job"}, **given)
    status = job.wait(120)
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, Reason.OUT_OF_MEMORY, 137), status
    assert "it used more memory than the pod may (--memory)" in status.message
    assert status.message.startswith(who)


def test_an_image_that_cannot_be_pulled(submit: Submit) -> None:
    job = submit("true", options={"image": "example.org/no-such:1"})
    until(lambda: job.status().reason is Reason.SETUP, "it is said")
    status = job.status()
    assert status.state is State.QUEUED
    assert "the image cannot be pulled: " in status.message
    assert "example.org/no-such:1" in status.message
    job.cancel(wait=False)


@pytest.mark.long
def test_fifty_jobs_at_once(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with_quota(kubernetes, namespace, {"count/pytorchjobs.kubeflow.org": "50"})
    with ThreadPoolExecutor(max_workers=10) as pool:
        jobs: list[Job] = list(pool.map(lambda n: submit("true", (str(n),), options={"suspend": True}), range(50)))
    assert len({job.native_id for job in jobs}) == 50
    listed = schedulers.list_jobs()
    assert {record.status.native_state for record in listed if isinstance(record, Record)} == {"Suspended"}
    with ThreadPoolExecutor(max_workers=10) as pool:
        ended = list(pool.map(lambda job: job.cancel().state, jobs))
    assert set(ended) == {State.CANCELLED}
    assert kubernetes.objects(namespace) == ["resourcequotas/small"]


@pytest.mark.alone
def test_an_api_server_that_is_down(submit: Submit, kubernetes: Kubernetes) -> None:
    job = submit("sleep 600")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    kubernetes.stop_api()
    before = job.status()
    assert "cannot be reached" in job.record.warning
    assert not before.state.final
    with pytest.raises(Unreachable, match="cannot be reached"):
        job.cancel()
    with pytest.raises(schedulers.SubmitError, match="nothing was submitted"):
        submit("true")
    kubernetes.start_api()
    until(lambda: job.status().state is State.RUNNING, "it runs")
    assert job.record.warning == ""
    assert job.cancel().state is State.CANCELLED


def test_a_job_keeps_to_its_cluster(
    submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another context, another file, another directory: all that a status needs was kept."""
    job = submit("sleep 600")
    other = kubernetes.kubeconfig(namespace="default")
    monkeypatch.setenv("KUBECONFIG", str(other))
    fresh = schedulers.find(job.id)
    until(lambda: fresh.status().state is State.RUNNING, "it runs")
    monkeypatch.delenv("KUBECONFIG")
    assert schedulers.find(job.id).cancel().state is State.CANCELLED


def test_from_the_command_line(home: Path, namespace: str, project: Path, kubernetes: Kubernetes) -> None:
    (project / "accel.yaml").write_text(
        f"targets:\n  lab:\n    kind: kubernetes\n    workload: job\n    cpu: true\n    image: {IMAGE}\n"
        f"    namespace: {namespace}\n"
    )
    (project / "train.py").write_text("import os; print('rank', os.environ['RANK'], flush=True)\n")

    def accel(*words: str) -> str:
        words = (sys.executable, "-m", "accel", *words)
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    job_id = accel("submit", "--target", "lab", "--nodes", "2", "train.py").strip().splitlines()[-1]
    assert sorted(line for line in accel("logs", "-f", job_id).splitlines() if line.endswith(("rank 0", "rank 1")))
    assert '"succeeded"' in accel("status", "--json", job_id)
    accel("prune", job_id)
    until(lambda: kubernetes.objects(namespace) == [], "nothing is left")
