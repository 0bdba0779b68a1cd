"""Both charts in a real cluster, with both versions of Helm: installed, upgraded, tested, uninstalled.

The queues of Kueue and Volcano, which the cluster does not have, are switched off.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import schedulers
from schedulers import State, Store
from schedulers.jobs.attach import jobs_elsewhere
from tests.clusters.kube.client import MERGE, Refused
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.waiting import until

from . import charts, helms
from .releases import Failed, Releases, both, releases

NAME = "team"
# Of Helm itself: a Secret for each revision.
_RECORDS = re.compile(r"secrets/sh\.helm\.release\.v1\.")
_TOKENS = re.compile(r"secrets/.*-token-")


@pytest.fixture
def chart() -> Callable[[str], Path]:
    return lambda name: charts.ROOT / "helm" / name


@pytest.fixture
def helm(version: str, kubernetes: Kubernetes, namespace: str) -> Releases:
    return releases(version, kubernetes.kubeconfig(namespace=namespace), namespace)


def there(cluster: Kubernetes, namespace: str) -> list[str]:
    """All objects of the namespace, but for Helm's own records and the tokens that go with service accounts."""
    found: list[str] = []

    def listed() -> bool:
        try:
            found[:] = cluster.objects(namespace)
        except Refused as error:
            if error.status != 429:  # the API server has just learned of a kind, and reads what there is of it
                raise
            return False
        return True

    until(listed, "the API server lists every kind")
    return [each for each in found if not _RECORDS.match(each) and not _TOKENS.match(each)]


def until_there(cluster: Kubernetes, namespace: str, wanted: list[str]) -> None:
    deadline = time.monotonic() + 90
    while (found := there(cluster, namespace)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)


@both
def test_what_an_administrator_installs(
    helm: Releases, chart: Callable[[str], Path], kubernetes: Kubernetes, namespace: str
) -> None:
    made = chart("accel")
    helm.install(NAME, made, {})
    accounts = [f"serviceaccounts/{NAME}-accel", f"serviceaccounts/{NAME}-accel-job"]
    rights = [f"rolebindings/{NAME}-accel", f"roles/{NAME}-accel"]
    assert there(kubernetes, namespace) == sorted([*rights, *accounts])

    helm.upgrade(NAME, made, {"snapshots": {"create": True}, "networkPolicy": {"enabled": True}})
    claim = f"persistentvolumeclaims/{NAME}-accel-snapshots"
    more = [claim, f"networkpolicies/{NAME}-accel-jobs"]
    assert there(kubernetes, namespace) == sorted([*rights, *accounts, *more])
    assert helm.revisions(NAME) == 2
    role = kubernetes.client.call(
        "GET", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{NAME}-accel"
    )
    assert {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "resourceNames": [f"{NAME}-accel-snapshots"],
            "verbs": ["get"]} in role["rules"]  # fmt: skip

    helm.upgrade(NAME, made, {"snapshots": {"create": True}, "jobServiceAccount": {"create": False}})
    assert there(kubernetes, namespace) == sorted([*rights, accounts[0], claim])

    helm.uninstall(NAME)
    assert helm.revisions(NAME) is None
    assert there(kubernetes, namespace) == [claim]  # which the chart says that it keeps
    assert [each for each in kubernetes.objects(namespace) if _RECORDS.match(each)] == []


@both
def test_a_claim_that_is_not_to_be_kept_goes(
    helm: Releases, chart: Callable[[str], Path], kubernetes: Kubernetes, namespace: str
) -> None:
    helm.install(NAME, chart("accel"), {"snapshots": {"create": True, "keep": False}})
    assert f"persistentvolumeclaims/{NAME}-accel-snapshots" in there(kubernetes, namespace)
    helm.uninstall(NAME)
    until_there(kubernetes, namespace, [])


@both
def test_the_charts_own_test(
    helm: Releases, chart: Callable[[str], Path], kubernetes: Kubernetes, namespace: str
) -> None:
    """It passes with the Role that there is, and names what the Role lacks."""
    repository, _, tag = IMAGE.rpartition(":")
    tools = {"image": {"repository": repository, "tag": tag}, "runAsUser": 1000}
    helm.install(NAME, chart("accel"), {"snapshots": {"create": True, "keep": False}, "tools": tools})
    before = there(kubernetes, namespace)
    helm.test(NAME)
    until_there(kubernetes, namespace, before)  # nothing is left of a test that passed

    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles/{NAME}-accel"
    role = kubernetes.client.call("GET", path)
    for rule in role["rules"]:
        rule["verbs"] = [verb for verb in rule["verbs"] if (rule["resources"], verb) != (["pods/log"], "get")]
    role["rules"] = [rule for rule in role["rules"] if rule["verbs"]]
    kubernetes.client.call("PUT", path, role)
    with pytest.raises(Failed):
        helm.test(NAME)
    (pod,) = checks(kubernetes, namespace)
    assert kubernetes.logs(namespace, pod).splitlines()[0] == "not allowed: get pods/log (group core)"
    helm.uninstall(NAME)
    the_failed_test_goes(kubernetes, namespace)


@both
@pytest.mark.usefixtures("home")
def test_a_training_job_by_values(
    version: str, helm: Releases, chart: Callable[[str], Path], kubernetes: Kubernetes, namespace: str
) -> None:
    made = chart("accel-job")
    values = {
        "image": IMAGE, "entry": "command", "argv": ["sh", "-c", "echo node $ACCEL_JOB_ID"], "nodes": 2,
        "cpu": True, "procsPerNode": 1, "ttl": 3600,
    }  # fmt: skip
    helm.install(NAME, made, values)
    jobs = f"/apis/kubeflow.org/v1/namespaces/{namespace}/pytorchjobs"

    def condition(name: str) -> bool:
        job = kubernetes.client.call("GET", f"{jobs}/{only(kubernetes, jobs)}")
        found = (job.get("status") or {}).get("conditions") or []
        return any(each["type"] == name and each["status"] == "True" for each in found)

    deadline = time.monotonic() + 120
    while not condition("Succeeded"):
        assert time.monotonic() < deadline, kubernetes.diagnose()
        time.sleep(0.2)
    name = only(kubernetes, jobs)
    if version == "helm3":  # as the other one does, with a launcher that takes its time
        helm.test(NAME)
    said = [kubernetes.logs(namespace, f"{name}-worker-{number}") for number in range(2)]
    assert [text.splitlines()[-1] for text in said] == [f"node {name.removeprefix(f'{NAME}-')}"] * 2, said

    # accel finds it on any machine that has a target for the namespace.
    job_id = name.removeprefix(f"{NAME}-")
    store = Store.default()
    (listed,) = jobs_elsewhere("kubernetes", store, {})
    assert (listed.id, listed.name, listed.nodes, listed.status.state) == (job_id, NAME, 2, State.SUCCEEDED)
    assert store.ids() == []
    job = schedulers.find(job_id, target="kubernetes")
    assert abs(job.record.created_at - listed.created_at) < 1
    assert job.wait(60).state is State.SUCCEEDED
    assert [line.text for line in job.logs() if line.text.startswith("node")] == [f"node {job_id}\n"] * 2

    # A job that is another one gets another name: Helm makes it, and takes the earlier one away.
    helm.upgrade(NAME, made, {**values, "argv": ["no-such-command"]})
    assert helm.revisions(NAME) == 2
    deadline = time.monotonic() + 90
    while name in (left := [each["metadata"]["name"] for each in kubernetes.client.call("GET", jobs)["items"]]):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert len(left) == 1
    if version == "helm3":
        with pytest.raises(Failed):
            helm.test(NAME)
        (pod,) = checks(kubernetes, namespace)
        assert "there is no command no-such-command" in kubernetes.logs(namespace, pod)
    helm.uninstall(NAME)
    if version == "helm3":
        the_failed_test_goes(kubernetes, namespace)
    until_there(kubernetes, namespace, [])


@both
def test_each_kind_of_training_job_by_values(
    helm: Releases, chart: Callable[[str], Path], kubernetes: Kubernetes, namespace: str
) -> None:
    """Held back, so that nothing runs; the API server takes their objects, and Helm takes them away again."""
    made = chart("accel-job")
    values = {"image": IMAGE, "argv": ["train.py"], "nodes": 2, "timeLimit": 60, "suspend": True}
    for workload in ("jobset", "job", "trainjob"):
        helm.install(workload, made, {**values, "workload": workload, "maxRestarts": 1})
    kinds = [each.partition("/")[0] for each in there(kubernetes, namespace)]
    assert {"jobs", "jobsets", "services", "trainingruntimes", "trainjobs"} <= set(kinds)
    for workload in ("jobset", "job", "trainjob"):
        helm.uninstall(workload)

    def left() -> list[str]:
        return [each for each in there(kubernetes, namespace) if not each.startswith("trainingruntimes/trainjob-")]

    until(lambda: left() == [], "but for the runtime, which is a hook, nothing is left")


def test_a_train_job_is_made_at_the_first_try_without_helm(
    helm3: helms.Helm3, kubernetes: Kubernetes, namespace: str
) -> None:
    """As kubectl makes what `helm template` gives: object after object."""
    values = {"image": IMAGE, "argv": ["train.py"], "workload": "trainjob", "suspend": True}
    for made in helms.objects(helm3.render(charts.ROOT / "helm/accel-job", values, namespace=namespace)):
        kubernetes.apply(made, namespace)
    kinds = {each.partition("/")[0] for each in there(kubernetes, namespace)}
    assert {"trainingruntimes", "trainjobs"} <= kinds


def the_failed_test_goes(cluster: Kubernetes, namespace: str) -> None:
    """It stays to be looked at for the time that its Job says, which passes here at once, and nothing is left."""
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
    name = only(cluster, jobs)
    until(
        lambda: {each.partition("/")[0] for each in there(cluster, namespace)} <= {"jobs", "pods", "events"},
        "the release is gone",
    )
    cluster.client.call("PATCH", f"{jobs}/{name}", {"spec": {"ttlSecondsAfterFinished": 0}}, content_type=MERGE)
    until_there(cluster, namespace, [])


def checks(cluster: Kubernetes, namespace: str) -> list[str]:
    """The pods of the charts' own tests."""
    pods = [each.removeprefix("pods/") for each in there(cluster, namespace) if each.startswith("pods/")]
    return [pod for pod in pods if "-check-" in pod]


def only(cluster: Kubernetes, path: str) -> str:
    (found,) = cluster.client.call("GET", path)["items"]
    return str(found["metadata"]["name"])
