"""Who asks a real API server: people, service accounts, plug-ins, pods; what they may, and what is said when not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import schedulers
from schedulers import SchedulerError, State, SubmitError
from schedulers.errors import ConfigError
from schedulers.kubernetes.client.api import Api
from schedulers.kubernetes.client.errors import Forbidden, Unauthorized
from schedulers.kubernetes.options import KubernetesOptions
from schedulers.kubernetes.preflight import required_permissions
from schedulers.store.record import Record
from tests.clusters.kubernetes import IMAGE, Kubernetes
from tests.marks import long
from tests.waiting import until

from ..conftest import Submit, made_by, printed

ACCOUNT = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "bot"}}
Verbs = dict[tuple[str, str], tuple[str, ...]]


def allow(kubernetes: Kubernetes, namespace: str, verbs: Verbs) -> Path:
    """A kubeconfig of an account that may do just that."""
    rules = [{"apiGroups": [group], "resources": [what], "verbs": list(verb)} for (group, what), verb in verbs.items()]
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "bot"}, "rules": rules}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "bot"}
    subject = {"kind": "ServiceAccount", "name": "bot", "namespace": namespace}
    binding = {**role, "kind": "RoleBinding", "roleRef": reference, "subjects": [subject]}
    del binding["rules"]
    for each in (ACCOUNT, role, binding):
        kubernetes.apply(each, namespace)
    path = kubernetes.kubeconfig(service_account="bot", namespace=namespace)
    first = next(((group, what, verb) for (group, what), all_verbs in verbs.items() for verb in all_verbs), None)
    if first is not None:  # the API server's own list of Roles follows what is written a moment later
        until(lambda: permitted(path, namespace, *first), "the Role counts")
    return path


def permitted(kubeconfig: Path, namespace: str, group: str, resource: str, verb: str) -> bool:
    place = {"namespace": namespace, "group": group, "resource": resource, "verb": verb}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    api = Api(KubernetesOptions(kubeconfig=str(kubeconfig)), "k")
    try:
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = api.call("POST", path, body={**body, "spec": {"resourceAttributes": place}})
    finally:
        api.close()
    return bool(answer["status"]["allowed"])


def options(workload: str = "job", **more: Any) -> KubernetesOptions:
    return KubernetesOptions(workload=workload, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("workload", ["pytorchjob", *long("jobset", "job", "trainjob")])
def test_what_check_asks_for_is_enough(
    workload: str, submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service account that may do just what is asked about does everything."""
    path = allow(kubernetes, namespace, required_permissions(options(workload)))
    monkeypatch.setenv("KUBECONFIG", str(path))
    job = submit("echo told; cat note.txt; sleep 600", nodes=2, options={"workload": workload, "code": "auto"})
    until(lambda: printed(job) == "told\ncode\n" * 2, "it runs")
    assert job.cancel().state is State.CANCELLED
    again = submit("true", options={"workload": workload, "code": "auto"})
    assert again.wait(120).state is State.SUCCEEDED
    from schedulers.jobs.prune import prune
    from schedulers.store.store import Store

    assert prune(Store.default(), ids=[again.id]).kept_reasons == ()
    until(lambda: made_by(again, kubernetes, namespace) == [], "it is gone")


@pytest.mark.parametrize(
    ("lacking", "line"),
    [
        (("batch", "jobs", "create"), "may not create jobs.batch in namespace "),
        (("", "services", "create"), "may not create services in namespace "),
        (("", "configmaps", "create"), "may not create configmaps in namespace "),
    ],
)
def test_a_verb_that_is_lacking_is_named_and_nothing_is_left(
    lacking: tuple[str, str, str],
    line: str,
    submit: Submit,
    kubernetes: Kubernetes,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, resource, verb = lacking
    verbs = required_permissions(options())
    verbs[group, resource] = tuple(each for each in verbs[group, resource] if each != verb)
    monkeypatch.setenv("KUBECONFIG", str(allow(kubernetes, namespace, verbs)))
    with pytest.raises(SubmitError) as refusal:
        submit("true", options={"workload": "job", "code": "auto"})
    said = str(refusal.value)
    assert said == f"target kubernetes: service account {namespace}/bot {line}{namespace}: no Role grants this"
    until(lambda: not [each for each in kubernetes.objects(namespace) if "/sh-" in each], "nothing is left")


def test_what_cannot_be_removed_again_is_not_given_up(
    submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's object is there: the job is kept as submitting, and is whole once the Role allows it."""
    from schedulers.jobs.poll import restore

    verbs = required_permissions(options())
    less = {**verbs, ("", "configmaps"): ("get",), ("batch", "jobs"): ("create", "get", "list", "watch")}
    monkeypatch.setenv("KUBECONFIG", str(allow(kubernetes, namespace, less)))
    with pytest.raises(schedulers.Unreachable) as refusal:
        submit("true", options={"workload": "job", "code": "auto", "suspend": True})
    assert "may not create configmaps" in str(refusal.value)
    assert "was created and is not deleted yet" in str(refusal.value)
    (record,) = schedulers.list_jobs(refresh=False)
    assert isinstance(record, Record)
    assert record.status.state is State.SUBMITTING
    monkeypatch.setenv("KUBECONFIG", str(allow(kubernetes, namespace, verbs)))
    place = record.directory / "kubernetes/placed.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "kubeconfig": str(kubernetes.kubeconfig())}))
    restore(record).submit(record.plan())
    found = [each.partition("/")[0] for each in made_by(schedulers.find(record.id), kubernetes, namespace)]
    assert {"configmaps", "jobs", "services"} <= set(found)


def test_a_verb_that_is_lacking_later(
    submit: Submit, kubernetes: Kubernetes, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verbs = required_permissions(options())
    verbs["batch", "jobs"] = tuple(each for each in verbs["batch", "jobs"] if each != "delete")
    monkeypatch.setenv("KUBECONFIG", str(allow(kubernetes, namespace, verbs)))
    job = submit("true", options={"workload": "job", "suspend": True})
    with pytest.raises(SchedulerError, match=f"may not delete jobs.batch in namespace {namespace}"):
        job.cancel(wait=False)


def test_check(kubernetes: Kubernetes, namespace: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from schedulers.config.named_targets import load_target

    def check(gpus: int = 0, **given: Any) -> Any:
        return load_target("kubernetes", home / "jobs", overrides=given).check(gpus)  # type: ignore[attr-defined]

    found = check(8)
    rows = dict(found.table[1:])
    assert (found.failures, found.warnings) == ((), ())
    assert rows["Kubernetes"].startswith("v1.")
    assert rows["API server"] == f"{kubernetes.server}, as context test"
    assert rows["workloads"] == "pytorchjob, jobset, job, trainjob"
    assert rows[f"namespace {namespace}"] == "exists"
    assert rows["may use pytorchjobs.kubeflow.org"] == "create, get, list, watch, delete, patch"
    assert rows["may use pods/exec"] == "get, create"
    assert rows["nodes"] == "2 (2 with GPUs)"
    assert check(9).failures == ("target kubernetes: no node has 9 nvidia.com/gpu: the most is 8",)
    assert check(namespace="nowhere").failures == (
        "target kubernetes: namespace nowhere not found (namespace: in accel.yaml)",
    )
    (missing,) = check(code_claim="snapshots").failures
    assert missing == f"target kubernetes: code_claim: no claim snapshots in namespace {namespace}"
    verbs = required_permissions(options("pytorchjob"))
    verbs["", "pods"] = ("get",)
    monkeypatch.setenv("KUBECONFIG", str(allow(kubernetes, namespace, verbs)))
    found = check()
    may_not = "target kubernetes: context test may not {} in namespace " + f"{namespace}: no Role grants this"
    assert found.failures == (may_not.format("list, watch pods"),)
    assert found.warnings == (
        may_not.format("patch pytorchjobs.kubeflow.org") + ". Without it the reason of a failure is lost with the pods",
        may_not.format("get namespaces") + ". Without it, another cluster at the same address is taken for this one",
        may_not.format("get, create pods/exec") + ". Only `accel shell` needs it",
    )


def test_a_quota_in_check(kubernetes: Kubernetes, namespace: str, home: Path) -> None:
    from schedulers.config.named_targets import load_target

    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    kubernetes.apply({**quota, "spec": {"hard": {"requests.nvidia.com/gpu": "4", "pods": "10"}}}, namespace)
    target: Any = load_target("kubernetes", home / "jobs")
    until(lambda: dict(target.check().table[1:]).get("quota small", "").startswith("pods 0 of 10"), "it counts")
    assert target.check(8).failures == (
        "target kubernetes: quota small has 4 nvidia.com/gpu left, and 8 are requested",
    )


def test_a_token_that_has_expired(
    kubernetes: Kubernetes, namespace: str, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubernetes.apply(ACCOUNT, namespace)
    token = kubernetes.token("bot", namespace, expired=True)
    path = kubernetes.kubeconfig(service_account="bot", namespace=namespace, token=token)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match="the credentials of context test are not accepted: expired, or not of this"):
        submit("true")
    assert schedulers.list_jobs(refresh=False) == []


@pytest.mark.parametrize("expired", [False, True])
def test_an_exec_plug_in(
    expired: bool,
    kubernetes: Kubernetes,
    namespace: str,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    path = allow(kubernetes, namespace, required_permissions(options("pytorchjob")))
    token = kubernetes.token("bot", namespace, expired=expired)
    given = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": token}}
    (tmp_path / "given.json").write_text(json.dumps(given))
    content = yaml.safe_load(path.read_text())
    wanted = {"apiVersion": given["apiVersion"], "command": "cat", "args": [str(tmp_path / "given.json")]}
    content["users"][0]["user"] = {"exec": {**wanted, "interactiveMode": "Never"}}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    if expired:
        with pytest.raises(ConfigError, match="are not accepted: expired"):
            submit("true")
    else:
        assert submit("true").wait(90).state is State.SUCCEEDED


def test_a_certificate_that_has_expired(kubernetes: Kubernetes, tmp_path: Path) -> None:
    told = yaml.safe_load(kubernetes.kubeconfig().read_text())
    file, key = kubernetes.control.authority.issue("late", ("system:masters",), expired=True)
    told["users"][0]["user"] = {"client-certificate": str(file), "client-key": str(key)}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(told))
    api = Api(KubernetesOptions(kubeconfig=str(tmp_path / "kubeconfig")), "k")
    with pytest.raises(Unauthorized, match="the credentials of context test are not accepted: expired, or not of this"):
        api.versions()
    api.close()


def test_somebody_who_asks_as_another(kubernetes: Kubernetes, namespace: str, tmp_path: Path) -> None:
    """Of an answer, and of a program in a container: the websocket is another connection."""
    told = yaml.safe_load(kubernetes.kubeconfig(namespace=namespace).read_text())
    told["users"][0]["user"] |= {"as": "ann", "as-groups": ["team", "system:authenticated"]}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(told))
    api = Api(KubernetesOptions(kubeconfig=str(tmp_path / "kubeconfig")), "k")
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    found = api.call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", body=body)["status"]["userInfo"]
    assert (found["username"], found["groups"]) == ("ann", ["team", "system:authenticated"])
    with pytest.raises(Forbidden, match=f"user ann may not (create|get) pods/exec in namespace {namespace}: no Role"):
        api.connect("any", ["true"])
    api.close()


def test_a_certificate_without_any_role(kubernetes: Kubernetes, namespace: str) -> None:
    api = Api(KubernetesOptions(kubeconfig=str(kubernetes.kubeconfig("ann", namespace=namespace))), "k")
    with pytest.raises(Forbidden, match=f"user ann may not list pods in namespace {namespace}: no Role"):
        api.call("GET", api.path("v1", "pods"))
    api.close()


def test_from_inside_the_cluster(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    """A pod submits a job with what every pod of its service account has."""
    allow(kubernetes, namespace, required_permissions(options("pytorchjob")))
    code = (
        "import os, schedulers; os.environ['ACCEL_HOME'] = '/tmp/home'\n"
        "job = schedulers.submit('true', entry='command', target='kubernetes', procs_per_node=1, cwd='/tmp',\n"
        f"  options={{'cpu': True, 'image': '{IMAGE}', 'code': 'image'}})\n"
        "print('inner', job.wait(120).state.value, flush=True)"
    )
    job = submit('python -c "$1"', (code,), options={"service_account": "bot", "workload": "job"})
    status = job.wait(180)
    assert "inner succeeded" in printed(job), status


def test_a_job_that_runs_is_not_cleared(submit: Submit, kubernetes: Kubernetes, namespace: str) -> None:
    from schedulers.jobs.poll import restore
    from schedulers.target import SupportsClear, SupportsRunning

    job = submit("sleep 600")
    until(lambda: job.status().state is State.RUNNING, "it runs")
    target = restore(job.record)
    assert isinstance(target, SupportsClear)
    assert isinstance(target, SupportsRunning)
    (line,) = target.running({job.id: job.native_id, "other": None}).values()
    assert str(line).endswith(" has not ended")
    assert schedulers.find(job.id).cancel().state is State.CANCELLED
    assert target.clear({job.id: job.native_id, "other": None}) == []
