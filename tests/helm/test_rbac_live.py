"""The Role of helm/accel on a real API server: with exactly its rules everything can be done, and a verb that is taken
away is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import Job, SchedulerError, State
from schedulers.config.named_targets import load_target
from schedulers.jobs.prune import prune
from schedulers.store.store import Store
from tests.clusters.fixtures import using
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.marks import long
from tests.waiting import until

from ..schedulers.kubernetes.conftest import made_by, printed
from . import charts, helms

ACCOUNT = "accel"
CLAIM = "accel-snapshots"
KINDS = ("pytorchjob", "job", "jobset", "trainjob")
WORKLOADS = tuple(f"{kind}s" for kind in KINDS)
VALUES = {
    "fullnameOverride": ACCOUNT,
    "kinds": dict.fromkeys(KINDS, True),
    "snapshots": {"create": True, "accessModes": ["ReadWriteMany"]},
}
# The options with which a target needs what the Role allows.
OPTIONS: dict[str, dict[str, Any]] = {
    "jobsets": {"workload": "jobset"},
    "jobs": {"workload": "job"},
    "trainjobs": {"workload": "trainjob"},
    "trainingruntimes": {"workload": "trainjob"},
    "persistentvolumeclaims": {"code_claim": CLAIM},
    "pods": {"code_claim": CLAIM},
    "pods/exec": {"code_claim": CLAIM},
}
BASE = {"cpu": True, "image": IMAGE, "code": "auto"}
ROLE = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles/" + ACCOUNT

Rules = list[dict[str, Any]]


def _rules() -> Rules:
    try:
        text = helms.Helm3(helms.helm3()).render(charts.ROOT / "helm/accel", VALUES)
    except pytest.skip.Exception:
        return []  # the tests below are skipped too
    rules: Rules = helms.named(text, "Role")["rules"]
    return rules


VERBS = [(rule["resources"][0], verb) for rule in _rules() for verb in rule["verbs"]]


def _only(kind: str) -> dict[str, Any]:
    """The values for jobs of this kind alone."""
    return {**VALUES, "kinds": {each: each == kind for each in KINDS}}


def _install(cluster: Kubernetes, namespace: str, values: dict[str, Any] = VALUES) -> Path:
    """The kubeconfig of the chart's service account."""
    for each in helms.objects(helms.Helm3(helms.helm3()).render(charts.ROOT / "helm/accel", values)):
        if each["kind"] in ("ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim"):
            each["metadata"]["namespace"] = namespace
            for subject in each.get("subjects", []):
                subject["namespace"] = namespace
            cluster.apply(each, namespace)
    place = {"namespace": namespace, "group": "", "resource": "pods", "verb": "list"}
    spec = {"user": f"system:serviceaccount:{namespace}:{ACCOUNT}", "resourceAttributes": place}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    asked = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    until(lambda: cluster.client.call("POST", asked, review)["status"].get("allowed"), "the Role counts")
    return cluster.kubeconfig(service_account=ACCOUNT, namespace=namespace)


@pytest.fixture
def account(
    request: pytest.FixtureRequest, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The namespace, in which this process is the chart's service account; a parameter is the chart's values."""
    monkeypatch.setenv("KUBECONFIG", str(_install(kubernetes, namespace, getattr(request, "param", VALUES))))
    return namespace


@pytest.fixture(scope="module")
def lasting(_cluster: Kubernetes, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A namespace of the chart's for several tests, and its service account's kubeconfig. Both ends wait for another
    worker's test that has the cluster to itself: that one may stop the API server."""
    with using(_cluster, request) as cluster:
        made = cluster.namespace()
        file = _install(cluster, made)
    try:
        yield made, file
    finally:
        with using(_cluster, request) as cluster:
            cluster.remove_namespace(made)


@pytest.fixture
def submit(account: str, home: Path, tmp_path: Path) -> Callable[..., Job]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/note.txt").write_text("code\n")

    def submit(text: str, nodes: int = 1, **options: Any) -> Job:
        return schedulers.submit(
            "sh", ["-c", text], entry="command", target="kubernetes", nodes=nodes, procs_per_node=1, grace_s=2.0,
            cwd=tmp_path / "code", options={**BASE, **options},
        )  # fmt: skip

    return submit


def target(home: Path, **options: Any) -> Any:
    return load_target("kubernetes", home / "jobs", overrides={**BASE, **options})


def without(cluster: Kubernetes, namespace: str, resource: str, verb: str) -> None:
    """The Role loses one verb; returns when the API server knows."""
    path = ROLE.format(namespace)
    role = cluster.client.call("GET", path)
    for rule in role["rules"]:
        if resource in rule["resources"]:
            rule["verbs"] = [each for each in rule["verbs"] if each != verb]
            group = rule["apiGroups"][0]
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
    cluster.client.call("PUT", path, role)
    plural, _, sub = resource.partition("/")
    place = {"namespace": namespace, "group": group, "resource": plural, "subresource": sub, "verb": verb}
    place |= {"name": CLAIM} if plural == "persistentvolumeclaims" else {}
    spec = {"user": f"system:serviceaccount:{namespace}:{ACCOUNT}", "resourceAttributes": place}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    asked = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    until(lambda: not cluster.client.call("POST", asked, review)["status"].get("allowed"), "the verb is gone")


@pytest.mark.parametrize(
    ("workload", "account"),
    [(KINDS[0], _only(KINDS[0])), *long(*((kind, _only(kind)) for kind in KINDS[1:]))],
    ids=KINDS,
    indirect=["account"],
)
def test_with_exactly_the_role_everything_can_be_done(
    workload: str, submit: Callable[..., Job], account: str, kubernetes: Kubernetes, home: Path,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    asked = target(home, workload=workload, code_claim=CLAIM).check()
    assert asked.failures == ()

    job = submit("cat note.txt", nodes=2, workload=workload)
    plan = job.record.plan()
    ours = target(home, workload=workload)
    assert ours.submit(plan) == job.native_id  # again: it finds the first one
    assert ours.review(ours.plan(job.spec, "dry-run")) == []
    assert job.wait(180).state is State.SUCCEEDED
    assert printed(job) == "code\n" * 2

    monkeypatch.setenv("ACCEL_HOME", str(tmp_path / "elsewhere"))
    found = schedulers.find(job.id, Store.default(), target="kubernetes", options={**BASE, "workload": workload})
    assert found.status().state is State.SUCCEEDED
    monkeypatch.setenv("ACCEL_HOME", str(home))

    assert prune(Store.default(), ids=[job.id]).kept_reasons == ()
    until(lambda: made_by(job, kubernetes, account) == [], "nothing is left of a job that was cleared")


def test_a_shell_and_a_cancel_with_exactly_the_role(
    submit: Callable[..., Job], account: str, kubernetes: Kubernetes, capfd: pytest.CaptureFixture[str]
) -> None:
    job = submit("echo up; sleep 1000", code_claim=CLAIM, code="pvc")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    until(lambda: "up\n" in printed(job), "it has said so")
    with open(os.devnull) as nothing:
        before, sys.stdin = sys.stdin, nothing
        try:
            assert job.shell(0, ["sh", "-c", "echo here; exit 3"]) == 3
        finally:
            sys.stdin = before
    assert "here" in capfd.readouterr().out
    assert job.cancel().state is State.CANCELLED
    until(lambda: made_by(job, kubernetes, account) == [], "nothing is left of a job that was cancelled")


@pytest.mark.parametrize(("resource", "verb"), VERBS, ids=[f"{verb}-{resource}" for resource, verb in VERBS])
def test_a_verb_that_is_lacking_is_named(
    resource: str, verb: str, lasting: tuple[str, Path], home: Path, kubernetes: Kubernetes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    namespace, file = lasting
    monkeypatch.setenv("KUBECONFIG", str(file))
    whole = kubernetes.client.call("GET", ROLE.format(namespace))["rules"]
    without(kubernetes, namespace, resource, verb)
    try:
        checked = target(home, **OPTIONS.get(resource, {})).check()
    finally:
        role = kubernetes.client.call("GET", ROLE.format(namespace))
        kubernetes.client.call("PUT", ROLE.format(namespace), {**role, "rules": whole})
    group = next(rule["apiGroups"][0] for rule in whole if resource in rule["resources"])
    called = f"{resource}.{group}".rstrip(".")
    optional = resource == "namespaces" or (resource in WORKLOADS and verb == "patch")
    found = checked.warnings if optional else checked.failures
    assert len(checked.warnings) + len(checked.failures) == len(found) == 1, checked
    assert f"may not {verb} {called} in namespace {namespace}: no Role grants this" in found[0]


def _submitting(submit: Callable[..., Job]) -> None:
    submit("true")


def _cancelling(submit: Callable[..., Job]) -> None:
    submit("sleep 100").cancel(wait=False)


def _asking(submit: Callable[..., Job]) -> None:
    job = submit("sleep 100")
    job.status()
    raise SchedulerError(job.record.warning or "no warning")


def _reading(submit: Callable[..., Job]) -> None:
    job = submit("echo up; sleep 100")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    list(job.logs())


def _shell(submit: Callable[..., Job]) -> None:
    job = submit("echo up; sleep 100")
    until(lambda: "up\n" in printed(job), "it runs")
    job.shell(0, ["true"], terminal=False)


@pytest.mark.parametrize(
    ("resource", "verb", "doing"),
    [
        ("pytorchjobs", "create", _submitting),
        ("configmaps", "create", _submitting),
        ("pytorchjobs", "delete", _cancelling),
        ("pods", "list", _asking),
        ("pods/log", "get", _reading),
        ("pods/exec", "get", _shell),
    ],
)  # fmt: skip
def test_what_cannot_be_done_for_want_of_a_verb_says_so(
    resource: str, verb: str, doing: Callable[[Callable[..., Job]], None], submit: Callable[..., Job], account: str,
    kubernetes: Kubernetes,
) -> None:  # fmt: skip
    without(kubernetes, account, resource, verb)
    called = f"{resource}.kubeflow.org" if resource == "pytorchjobs" else resource
    wanted = rf"may not {verb} {called} in namespace {account}: no Role grants this"
    with pytest.raises(SchedulerError, match=wanted):
        doing(submit)
