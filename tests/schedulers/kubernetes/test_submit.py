"""A job is submitted once, wherever its submit is killed; and what the cluster refuses leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, Reason, State, SubmitError, Unreachable
from schedulers.errors import SchedulerError
from schedulers.job import JobSpec
from schedulers.jobs.poll import restore
from schedulers.kubernetes import names
from schedulers.kubernetes.client.api import Api
from schedulers.store.record import Record
from schedulers.target import SupportsClear
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.marks import long
from tests.waiting import until

from .conftest import MakeApi, Submit, judging, made_by, with_quota
from .servers import refused, said, serving

# Submits a job, and is killed by itself at the Nth of: each question to the API server, before it is sent and when
# it is answered; and each step in the job's directory on the way.
CUT = """\
import os, signal, sys

steps = 0
def step():
    global steps
    steps += 1
    if steps == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

def audited(event, args):
    if event in ("open", "os.rename", "os.mkdir") and "placed.json" in str(args[:2]):
        step()

import schedulers, urllib3
ask = urllib3.PoolManager.request
def asked(*args, **options):
    step()
    answer = ask(*args, **options)
    step()
    return answer
urllib3.PoolManager.request = asked
sys.addaudithook(audited)
schedulers.submit("true", entry="command", target="kubernetes", nodes=2, procs_per_node=1, code=".",
                  options={"cpu": True, "image": "example.org/train:1", "suspend": True, "workload": sys.argv[2]})
print("whole")
"""


def the_job() -> Job:
    (found,) = schedulers.list_jobs(refresh=False)
    assert isinstance(found, Record)
    return Job(found)


def submit_again(job: Job) -> str:
    return restore(job.record).submit(job.record.plan())


@pytest.mark.parametrize("workload", ["pytorchjob", *long("job", "jobset", "trainjob")])
def test_killed_at_every_step(
    workload: str,
    kubernetes: Kubernetes,
    namespace: str,
    home: Path,
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = False
    count = 0
    while not whole:
        count += 1
        assert count < 60
        monkeypatch.setenv("ACCEL_HOME", str(home / str(count)))
        words = [sys.executable, "-c", CUT, str(count), workload]
        done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120)
        whole = done.stdout == "whole\n"
        assert whole or done.returncode == -9, done.stderr
        if not schedulers.list_jobs(refresh=False):  # cut in the first request, which identifies the cluster
            assert count < 5
            continue
        job = the_job()
        assert job.native_id is not None or not whole
        (project / "note.txt").write_text(f"changed since {count}\n")  # the job is the one that was submitted
        assert job.status().state is State.QUEUED, job.record.warning
        found = made_by(job, kubernetes, namespace)
        name = f"true-{job.id}"
        others = {"job": [f"services/{name}"], "trainjob": [f"trainingruntimes/{name}"]}.get(workload, [])
        ours = {f"configmaps/{name}-code-0", f"services/{name}-rendezvous", f"{workload}s/{name}", *others}
        assert ours <= set(found), count  # more may be there: what the controllers make of these
        kinds = [each.partition("/")[0] for each in found]
        assert (kinds.count("configmaps"), kinds.count(f"{workload}s")) == (1, 1), count
        job.cancel(wait=False)
        until(lambda job=job: made_by(job, kubernetes, namespace) == [], "everything belongs to the job")  # type: ignore[misc]
    assert count > 8


@pytest.mark.parametrize("workload", ["pytorchjob", *long("job", "jobset", "trainjob")])
def test_what_a_submit_left_that_was_cut_off_is_cleared(
    workload: str, submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the job's object is there nothing belongs to it."""
    call = Api.call

    def cutting(self: Api, method: str, path: str, **more: Any) -> dict[str, Any]:
        if method == "POST" and path.endswith(f"/{workload}s"):
            raise KeyboardInterrupt
        return call(self, method, path, **more)

    monkeypatch.setattr(Api, "call", cutting)
    with pytest.raises(KeyboardInterrupt):
        submit("true", nodes=2, options={"workload": workload})
    job = the_job()
    runtimes = [f"trainingruntimes/sh-{job.id}"] if workload == "trainjob" else []
    assert {f"services/sh-{job.id}-rendezvous", *runtimes} <= set(made_by(job, kubernetes, namespace))
    target = restore(job.record)
    assert isinstance(target, SupportsClear)
    assert target.clear({job.id: job.native_id}) == []
    until(lambda: made_by(job, kubernetes, namespace) == [], "nothing is left")


def test_submitted_twice_it_is_one_job(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("true", options={"code": "auto", "suspend": True})
    before = made_by(job, kubernetes, namespace)
    assert submit_again(job) == job.native_id
    (job.record.directory / "kubernetes/placed.json").unlink()
    assert submit_again(job) == job.native_id
    assert made_by(job, kubernetes, namespace) == before


def test_a_quota_is_no_answer_to_whether_an_object_is_there(
    submit: Submit, kubernetes: Kubernetes, namespace: str
) -> None:
    """API servers ask it first: a job that is whole stays as it is, and one that cannot be made whole goes."""
    job = submit("true", options={"code": "auto", "suspend": True})
    before = made_by(job, kubernetes, namespace)
    with_quota(kubernetes, namespace, {"count/configmaps": "0", "count/pytorchjobs.kubeflow.org": "0"})
    assert submit_again(job) == job.native_id
    assert made_by(job, kubernetes, namespace) == before
    kubernetes.client.call("DELETE", f"/api/v1/namespaces/{namespace}/configmaps/sh-{job.id}-code-0")
    with pytest.raises(SubmitError, match="exceeded quota: small"):
        submit_again(job)
    until(lambda: made_by(job, kubernetes, namespace) == [], "nothing is left")


def test_an_answer_that_is_lost_at_the_last_place_of_a_quota(
    submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Api.call
    lost: list[str] = []

    def losing(self: Api, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = call(self, method, path, **more)
        if method == "POST" and path.endswith("/jobs") and not lost:
            lost.append(path)
            raise Unreachable("the answer was lost")
        return answer

    monkeypatch.setattr(Api, "call", losing)
    with_quota(kubernetes, namespace, {"count/jobs.batch": "1"})
    job = submit("sleep 600", options={"workload": "job"})
    assert lost
    until(lambda: job.status().state is State.RUNNING, "it runs")
    # What runs is not removed for what it lacks now.
    kubernetes.client.call("DELETE", f"/api/v1/namespaces/{namespace}/services/sh-{job.id}")
    with_quota(kubernetes, namespace, {"count/services": "0"}, "none")
    assert submit_again(job) == job.native_id
    assert job.status().state is State.RUNNING
    assert job.cancel(wait=False).state is not State.FAILED


def test_quotas_that_are_counted_by_many_at_once_are_asked_again(
    make: MakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which a single API server rarely says: https://github.com/kubernetes/kubernetes/issues/67761"""
    from schedulers.kubernetes import submit as submits
    from schedulers.kubernetes.client.errors import Conflict

    words = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified; please try again'
    conflict = refused(409, "Conflict", words, name="q", kind="resourcequotas")
    absent = refused(404, "NotFound", "not found")
    made = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "annotations": {names.DIGEST: "d"}}}
    with serving(conflict, conflict, said(201, made)) as server:
        assert submits.create(make(server.url), made) == made
        assert [asked.partition(" ")[0] for asked in server.asked] == ["POST"] * 3
    monkeypatch.setattr(submits, "_TRANSIENT_S", 0.0)
    with serving(conflict, absent) as server, pytest.raises(Conflict, match="resourcequotas"):
        submits.create(make(server.url), made)


def mark(kubernetes: Kubernetes, path: str, digest: str | None) -> None:
    body = {"metadata": {"annotations": {names.DIGEST: digest}}}
    kubernetes.client.call("PATCH", path, body, content_type="application/merge-patch+json")


def test_something_else_of_that_name_stays(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    job = submit("true", options={"suspend": True})
    path = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs/sh-{job.id}"
    mark(kubernetes, path, "another")
    with pytest.raises(SubmitError) as refusal:
        submit_again(job)
    assert "exists already and is not this job's (accel created it for another purpose)" in str(refusal.value)
    mark(kubernetes, path, None)
    with pytest.raises(SubmitError) as refusal:
        submit_again(job)
    assert "(accel did not create it); it was left unchanged" in str(refusal.value)
    assert kubernetes.client.call("GET", path)["metadata"]["name"] == f"sh-{job.id}"


def test_the_workload_is_not_made_when_its_service_is_somebody_elses(
    submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that this submit made goes again; what was there stays."""
    from schedulers.store.store import Store

    job_id = "06zzzzzzzzz"
    monkeypatch.setattr(Store, "new_id", lambda self: job_id)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": f"sh-{job_id}"}}
    kubernetes.apply({**service, "spec": {"clusterIP": "None"}}, namespace)
    with pytest.raises(SubmitError, match=f"Service sh-{job_id} exists already and is not this job's"):
        submit("true", options={"workload": "job", "suspend": True})
    until(lambda: kubernetes.objects(namespace) == [f"services/sh-{job_id}"], "the rest is gone")
    status = the_job().status()
    assert (status.state, status.reason) == (State.FAILED, Reason.SETUP)


@pytest.mark.parametrize("counted", ["pytorchjobs.kubeflow.org", "configmaps"])
def test_a_quota_that_is_used_up(counted: str, submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    """Of the job's object, and of what comes after it, which takes the object with it again."""
    there = len(kubernetes.client.call("GET", f"/api/v1/namespaces/{namespace}/configmaps")["items"])
    most = {"configmaps": str(there), "pytorchjobs.kubeflow.org": "0"}[counted]
    with_quota(kubernetes, namespace, {f"count/{counted}": most})
    with pytest.raises(SubmitError) as refusal:
        submit("true", options={"code": "auto"})
    assert "the namespace's quota does not allow it: " in str(refusal.value)
    assert "exceeded quota: small" in str(refusal.value)
    status = the_job().status()
    assert (status.state, status.reason) == (State.FAILED, Reason.NO_CAPACITY)
    until(lambda: kubernetes.objects(namespace) == ["resourcequotas/small"], "nothing is left")


def test_a_quota_that_the_pods_do_not_fit_in(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    with_quota(kubernetes, namespace, {"pods": "0"})
    job = submit("true", cpus=1, memory_gb=1)
    until(lambda: job.status().reason is Reason.NO_CAPACITY, "it is said")
    assert "the namespace's quota does not allow its pods" in job.status().message
    assert job.cancel().state is State.CANCELLED


def test_an_admission_webhook_that_refuses(
    submit: Submit, kubernetes: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    with judging(kubernetes, namespace, "pytorchjobs", tmp_path / "pki", lambda made: "no image of example.org"):
        until(lambda: refused_by_webhook(submit, kubernetes, namespace), "the webhook is asked")


def refused_by_webhook(submit: Submit, kubernetes: Kubernetes, namespace: str) -> bool:
    try:
        submit("true", options={"suspend": True}).cancel(wait=False)
    except SubmitError as error:
        said = str(error)
    else:
        return False  # the API server has not heard of it yet
    until(lambda: kubernetes.objects(namespace) == [], "nothing is left")
    return "an admission webhook refuses it: " in said and "no image of example.org" in said


def test_a_namespace_that_is_not_there(submit: Submit) -> None:
    with pytest.raises(SubmitError, match=r"namespace nowhere not found .namespace: in accel.yaml"):
        submit("true", options={"namespace": "nowhere"})
    assert the_job().status().state is State.FAILED


def test_what_the_api_server_does_not_take(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    with pytest.raises(SubmitError) as refusal:
        submit("true", options={"patch": {"spec": {"runPolicy": {"backoffLimit": "many"}}}})
    assert "rejects PyTorchJob " in str(refusal.value)
    assert "spec.runPolicy.backoffLimit: " in str(refusal.value)
    assert kubernetes.objects(namespace) == []


def test_a_kind_that_is_not_there_names_those_that_are(kubernetes: Kubernetes, submit: Submit) -> None:
    with pytest.raises(SchedulerError, match=r"Volcano is not installed"):
        submit("true", options={"workload": "job", "volcano_queue": "gpus"})


@pytest.mark.alone
def test_an_api_server_that_goes_away_in_the_middle(
    submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the job's object was made, and before its code: the same submit, later, makes the rest."""
    call = Api.call
    stop: list[Callable[[], None]] = [kubernetes.stop_api]

    def stopping(self: Api, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = call(self, method, path, **more)
        if method == "POST" and path.endswith("pytorchjobs") and stop:
            stop.pop()()
        return answer

    monkeypatch.setattr(Api, "call", stopping)
    with pytest.raises(Unreachable, match="is kept as submitting"):
        submit("true", options={"code": "auto", "suspend": True})
    job = the_job()
    assert job.record.status.state is State.SUBMITTING
    kubernetes.start_api()
    assert [each.partition("/")[0] for each in made_by(job, kubernetes, namespace)] == ["pytorchjobs"]
    native_id = submit_again(job)
    assert native_id.rpartition("/")[0] == f"pytorchjob/{namespace}/sh-{job.id}/{job.id}"
    assert [each.partition("/")[0] for each in made_by(job, kubernetes, namespace)] == ["configmaps", "pytorchjobs"]


def test_secrets_go_by_reference_only(
    kubernetes: Kubernetes, namespace: str, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "do-not-leak")
    with pytest.raises(schedulers.SpecError, match="reads the cluster's Secrets only, as secret:NAME/KEY"):
        submit("true", secrets={"HF_TOKEN": "env:HF_TOKEN"})
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": "s3cret"}}
    kubernetes.apply(secret, namespace)
    job = submit("[ ${#HF_TOKEN} = 6 ] && echo told", secrets={"HF_TOKEN": "secret:hub/token"})
    assert job.wait(90).state is State.SUCCEEDED
    assert "s3cret" not in str(job.describe())


def test_a_spec_is_found_by_another_machine(
    submit: Submit, kubernetes: Kubernetes, namespace: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submit("sleep 600", name="found", options={"workload": "job"})
    monkeypatch.setenv("ACCEL_HOME", str(home.parent / "another machine"))
    options = {"cpu": True, "image": IMAGE}
    with pytest.raises(schedulers.UnknownJob):
        schedulers.find("0" * len(job.id), target="kubernetes", options=options)
    found = schedulers.find(job.id, target="kubernetes", options=options)  # though this one would make PyTorchJobs
    assert found.native_id == job.native_id
    assert found.spec == JobSpec.from_json(job.spec.to_json())
    until(lambda: found.status().state is State.RUNNING, "it runs")
    assert found.cancel().state is State.CANCELLED
    monkeypatch.setenv("ACCEL_HOME", str(home))
    assert job.wait(60).state is State.FAILED  # here nobody cancelled it
