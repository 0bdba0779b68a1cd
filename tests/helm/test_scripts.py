"""The scripts of helm/accel, run as the charts' pods run them: the words of the rendered command, the rendered Role."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import charts, checking, helms
from .apiserver import TOKEN, ApiServer, Object, serving

CHART = charts.ROOT / "helm/accel"
NOW = datetime.datetime.now(datetime.timezone.utc)
JOBS = f"/apis/batch/v1/namespaces/{helms.NAMESPACE}/jobs"
PYTORCHJOBS = f"/apis/kubeflow.org/v1/namespaces/{helms.NAMESPACE}/pytorchjobs"
CONFIG_MAPS = f"/api/v1/namespaces/{helms.NAMESPACE}/configmaps"
SERVICES = f"/api/v1/namespaces/{helms.NAMESPACE}/services"
PODS = f"/api/v1/namespaces/{helms.NAMESPACE}/pods"
RUNTIMES = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{helms.NAMESPACE}/trainingruntimes"
# A cluster without Volcano.
KINDS = {
    "/api/v1": ["configmaps", "pods", "services"],
    "/apis/batch/v1": ["jobs"],
    "/apis/kubeflow.org/v1": ["pytorchjobs"],
    "/apis/trainer.kubeflow.org/v1alpha1": ["trainingruntimes", "trainjobs"],
}
CLEANUP: dict[str, Any] = {
    "cleanup": {"enabled": True, "afterHours": 24},
    "kinds": {"trainjob": True},
    "snapshots": {"name": "code"},
    "volcano": {"podGroups": True},
}
HELMS = {"app.kubernetes.io/managed-by": "Helm"}


def ago(hours: float) -> str:
    return (NOW - datetime.timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def ours(job_id: str, **more: str) -> dict[str, str]:
    return {"accel.dev/job-id": job_id, **more}


def over(job: Object, kind: str, hours: float, status: str = "True") -> None:
    condition = {"type": kind, "status": status, "lastTransitionTime": ago(hours)}
    job["status"] = {"conditions": [{"type": "Running", "status": "False", "lastTransitionTime": ago(999)}, condition]}


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(TOKEN + "\n")
    return tmp_path


@pytest.fixture
def cluster(helm3: helms.Helm3) -> Iterator[ApiServer]:
    """A server on which the cleanup's account has the Role that the chart gives it."""
    role = helms.named(helm3.render(CHART, CLEANUP), "Role", "team-accel-cleanup")
    server = ApiServer(KINDS, role["rules"])
    with serving(server) as server.address:
        yield server


def run(text: str, kind: str, address: str, account: Path) -> subprocess.CompletedProcess[str]:
    """Runs what the pod of that kind of object would run."""
    found = [each for each in helms.objects(text) if each["kind"] == kind]
    pod = checking.pods(helms.hooked(found, "test") or found)[0]
    program, bare, script, *words = pod["containers"][0]["command"]
    assert (program, bare) == ("python3", "-B")
    path = CHART / "files" / Path(script).name
    argv = [sys.executable, "-B", str(path), *words, f"--server={address}", f"--account={account}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def clean(helm3: helms.Helm3, server: ApiServer, account: Path, **more: object) -> subprocess.CompletedProcess[str]:
    values = {**CLEANUP, "cleanup": {**CLEANUP["cleanup"], **more}}
    return run(helm3.render(CHART, values), "CronJob", server.address, account)


def test_jobs_that_ended_long_ago_go(helm3: helms.Helm3, cluster: ApiServer, account: Path) -> None:
    for number in range(450):  # three pages
        over(cluster.add(JOBS, f"old-{number}", labels=ours(f"old{number}")), "Complete", 25)
    over(cluster.add(PYTORCHJOBS, "failed", labels=ours("failed")), "Failed", 25)
    over(cluster.add(PYTORCHJOBS, "recent", labels=ours("recent")), "Succeeded", 23)
    over(cluster.add(PYTORCHJOBS, "resumed", labels=ours("resumed")), "Failed", 25, status="False")
    over(
        cluster.add(PYTORCHJOBS, "gitops", labels=ours("gitops", **{"app.kubernetes.io/managed-by": "Helm"})),
        "Failed",
        99,
    )
    over(cluster.add(JOBS, "somebody-elses", labels={}), "Complete", 999)
    cluster.add(JOBS, "running", labels=ours("running"))
    done = clean(helm3, cluster, account)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(cluster.deleted) == sorted([*(f"jobs/old-{n}" for n in range(450)), "pytorchjobs/failed"])


def test_what_no_job_owns_goes(helm3: helms.Helm3, cluster: ApiServer, account: Path) -> None:
    cluster.add(JOBS, "running", labels=ours("running"))
    for path in (CONFIG_MAPS, SERVICES, PODS, RUNTIMES):
        cluster.add(path, "gone", labels=ours("gone"), creationTimestamp=ago(25))
        cluster.add(path, "being-submitted", labels=ours("new"), creationTimestamp=ago(0))
        cluster.add(path, "of-a-job", labels=ours("running"), creationTimestamp=ago(25))
        cluster.add(path, "owned", labels=ours("x"), creationTimestamp=ago(25), ownerReferences=[{"name": "x"}])
        cluster.add(path, "other", labels={}, creationTimestamp=ago(999))
        cluster.add(path, "helms", labels=ours("gone", **HELMS), creationTimestamp=ago(999))
    # Helm forgets what its hooks have made.
    hook = {"labels": ours("released", **HELMS), "annotations": {"helm.sh/hook": "pre-install,pre-upgrade"}}
    cluster.add(RUNTIMES, "of-a-release-that-is-gone", creationTimestamp=ago(25), **hook)
    done = clean(helm3, cluster, account)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(cluster.deleted) == [
        "configmaps/gone", "pods/gone", "services/gone",
        "trainingruntimes/gone", "trainingruntimes/of-a-release-that-is-gone",
    ]  # fmt: skip


def test_a_job_that_changes_meanwhile_stays(helm3: helms.Helm3, cluster: ApiServer, account: Path) -> None:
    job = cluster.add(JOBS, "resumed", labels=ours("resumed"))
    over(job, "Failed", 25)
    cluster.before_delete = lambda path: job["metadata"].update(resourceVersion="2")
    done = clean(helm3, cluster, account)
    assert (done.returncode, done.stderr, cluster.deleted) == (0, "", [])


def test_a_dry_run_deletes_nothing(helm3: helms.Helm3, cluster: ApiServer, account: Path) -> None:
    over(cluster.add(JOBS, "old", labels=ours("old")), "Complete", 25)
    done = clean(helm3, cluster, account, dryRun=True)
    assert (done.returncode, done.stdout, cluster.deleted) == (0, "would delete jobs/old\n", [])


def test_nothing_is_called_left_over_when_a_kind_cannot_be_listed(
    helm3: helms.Helm3, cluster: ApiServer, account: Path
) -> None:
    cluster.rules = [rule for rule in cluster.rules if rule["apiGroups"] != ["kubeflow.org"]]
    cluster.add(CONFIG_MAPS, "of-a-pytorchjob", labels=ours("a"), creationTimestamp=ago(25))
    over(cluster.add(JOBS, "old", labels=ours("old")), "Complete", 25)
    done = clean(helm3, cluster, account)
    assert done.returncode == 1
    assert "pytorchjobs is forbidden" in done.stderr
    assert "Traceback" not in done.stderr
    assert cluster.deleted == ["jobs/old"]


def test_a_server_that_cannot_be_asked_is_a_line(helm3: helms.Helm3, cluster: ApiServer, account: Path) -> None:
    cluster.address = "http://127.0.0.1:1"
    done = clean(helm3, cluster, account)
    assert done.returncode == 1
    assert all(line.startswith("accel cleanup: GET /apis/") for line in done.stderr.splitlines())


@pytest.fixture
def everything(helm3: helms.Helm3) -> str:
    return helm3.render_for_cluster(CHART, charts.load(charts.VALUES / "accel/everything.yaml"))


def test_the_check_passes_with_exactly_the_role(everything: str, account: Path) -> None:
    rules = helms.named(everything, "Role", "team-ml")["rules"]
    server = ApiServer(KINDS, rules)
    with serving(server) as server.address:
        done = run(everything, "Job", server.address, account)
    assert done.returncode == 0, done.stdout + done.stderr
    count = sum(len(rule["verbs"]) for rule in rules)
    assert f"{count} of {count} permissions; kinds there: pytorchjobs, jobs, trainjobs" in done.stdout
    assert "does not have: jobsets" in done.stdout


def test_the_check_names_every_verb_that_is_lacking(everything: str, account: Path) -> None:
    rules = helms.named(everything, "Role", "team-ml")["rules"]
    server = ApiServer(KINDS)
    with serving(server) as server.address:
        for first in (0, 1):
            server.rules = [{**rule, "verbs": rule["verbs"][1 - first :: 2]} for rule in rules]
            done = run(everything, "Job", server.address, account)
            lacking = [
                f"not allowed: {verb} {rule['resources'][0]} (group {rule['apiGroups'][0] or 'core'})"
                for rule in rules
                for verb in rule["verbs"][first::2]
            ]
            assert done.returncode == 1
            assert done.stdout.splitlines()[: len(lacking)] == lacking


def test_the_check_fails_on_a_cluster_without_any_of_the_kinds(everything: str, account: Path) -> None:
    server = ApiServer({"/api/v1": ["configmaps"]}, helms.named(everything, "Role", "team-ml")["rules"])
    with serving(server) as server.address:
        done = run(everything, "Job", server.address, account)
    assert done.returncode == 1
    assert "kinds there: none" in done.stdout


@pytest.mark.parametrize(
    ("entry", "program", "line"),
    [
        ("script", "train.py", ""),
        ("script", "tran.py", "there is no script tran.py for a program that runs in "),
        ("module", "train", ""),
        ("module", "none.train", "there is no module none.train for a program that runs in "),
        ("command", "sh", ""),
        ("command", "no-such", "there is no command no-such for a program that runs in "),
    ],
)
def test_what_a_jobs_own_test_says(tmp_path: Path, entry: str, program: str, line: str) -> None:
    (tmp_path / "train.py").touch()
    words = [sys.executable, str(charts.ROOT / "helm/accel-job/files/check.py"), entry, program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if line else 0)
    assert done.stderr.startswith(line)
    assert line or f"; the {entry} {program} is there" in done.stdout
