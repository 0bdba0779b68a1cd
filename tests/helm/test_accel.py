"""helm/accel: what an administrator installs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from schedulers.kubernetes.options import KubernetesOptions, check

from . import charts, checking, helms

CHART = charts.ROOT / "helm/accel"
FILES = charts.values_files(CHART)
EVERYTHING = charts.load(charts.VALUES / "accel/everything.yaml")


def rules(role: helms.Manifest) -> dict[str, set[str]]:
    """resource -> verbs, of a Role whose rules have one resource each."""
    return {f"{rule['apiGroups'][0]}/{','.join(rule['resources'])}": set(rule["verbs"]) for rule in role["rules"]}


def test_the_role_is_the_least(helm: helms.Helm) -> None:
    role = helms.named(helm.render(CHART, {}), "Role")
    job = {"create", "get", "list", "watch", "patch", "delete"}
    made = {"create", "get", "list", "patch", "delete"}
    assert rules(role) == {
        "kubeflow.org/pytorchjobs": job,
        "jobset.x-k8s.io/jobsets": job,
        "batch/jobs": job,
        "/pods": {"get", "list", "watch"},
        "/pods/log": {"get"},
        "/namespaces": {"get"},
        "/events": {"list"},
        "/configmaps": made,
        "/services": made,
    }
    shell = helms.named(helm.render(CHART, {"rbac": {"shell": True}}), "Role")
    assert rules(shell) == rules(role) | {"/pods/exec": {"get", "create"}}


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "job", "trainjob"])
def test_nodes_of_each_kind_can_meet(kind: str, helm: helms.Helm) -> None:
    """Through a Service, which the cleanup removes where a submit was cut off."""
    known = ("pytorchjob", "jobset", "job", "trainjob")
    values = {"kinds": {each: each == kind for each in known}, "cleanup": {"enabled": True}}
    text = helm.render(CHART, values)
    assert rules(helms.named(text, "Role", "team-accel"))["/services"] >= {"create", "patch"}
    assert rules(helms.named(text, "Role", "team-accel-cleanup"))["/services"] == {"list", "delete"}
    assert '"resource":"services"' in str(helms.named(text, "CronJob"))


def test_what_is_not_wanted_is_not_allowed(helm: helms.Helm) -> None:
    values = charts.load(charts.VALUES / "accel/least.yaml")
    role = helms.named(helm.render(CHART, values), "Role", "007")
    assert set(rules(role)) == {"batch/jobs", "/pods", "/pods/log", "/namespaces", "/events", "/services"}
    assert "secrets" not in str(role)


def test_the_claim_is_named_in_the_role(helm: helms.Helm) -> None:
    text = helm.render(CHART, EVERYTHING)
    claim = helms.named(text, "PersistentVolumeClaim")
    rule = next(
        r for r in helms.named(text, "Role", "team-ml")["rules"] if r["resources"] == ["persistentvolumeclaims"]
    )
    assert rule["resourceNames"] == [claim["metadata"]["name"]] == ["2026"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "1.5Ti"
    assert "helm.sh/resource-policy" not in claim["metadata"]["annotations"]


def test_the_claim_stays_unless_told_otherwise(helm: helms.Helm) -> None:
    claim = helms.named(helm.render(CHART, {"snapshots": {"create": True}}), "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_every_verb_has_its_reason(helm3: helms.Helm3) -> None:
    text = helm3.render(CHART, EVERYTHING)
    role = next(part for part in text.split("---\n") if "templates/rbac.yaml" in part and "kind: Role\n" in part)
    verbs = [line for line in role.splitlines() if line.startswith("      - ")]
    assert len(verbs) == sum(len(rule["verbs"]) for rule in helms.objects(role)[0]["rules"])
    assert [line for line in verbs if " # " not in line] == []


def test_who_submits(helm: helms.Helm) -> None:
    account = {"kind": "ServiceAccount", "name": "submitter", "namespace": helms.NAMESPACE}
    binding = helms.named(helm.render(CHART, EVERYTHING), "RoleBinding", "team-ml")
    assert binding["subjects"] == [account, *EVERYTHING["rbac"]["subjects"]]
    people = charts.load(charts.VALUES / "accel/people.yaml")
    binding = helms.named(helm.render(CHART, people), "RoleBinding")
    assert binding["subjects"] == people["rbac"]["subjects"]


def test_training_pods_run_as_an_account_without_rights(helm: helms.Helm) -> None:
    text = helm.render(CHART, {})
    account = helms.named(text, "ServiceAccount", "team-accel-job")
    assert account["automountServiceAccountToken"] is False
    assert "team-accel-job" not in str(helms.named(text, "RoleBinding"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_pods_are_restricted(helm3: helms.Helm3, file: Path) -> None:
    for pod in checking.pods(helms.objects(helm3.render_for_cluster(CHART, charts.load(file)))):
        assert checking.unrestricted(pod) == []


def test_labels_and_annotations_are_on_everything(helm3: helms.Helm3) -> None:
    for made in helms.objects(helm3.render_for_cluster(CHART, EVERYTHING)):
        assert EVERYTHING["commonLabels"].items() <= made["metadata"]["labels"].items()
        assert EVERYTHING["commonAnnotations"].items() <= made["metadata"]["annotations"].items()


def specs(text: str, group: str) -> dict[str, Mapping[str, Any]]:
    """`Kind name` -> spec, of the objects of a group."""
    return {
        f"{o['kind']} {o['metadata']['name']}": {"namespace": o["metadata"].get("namespace"), **o["spec"]}
        for o in helms.objects(text)
        if checking.group(o) == group
    }


def test_the_queues_of_kueue(helm: helms.Helm) -> None:
    kueue = EVERYTHING["kueue"]
    flavor = {key: value for key, value in kueue["resourceFlavors"][0].items() if key != "name"}
    text = helm.render(CHART, EVERYTHING)
    assert specs(text, "kueue.x-k8s.io") == {
        "ResourceFlavor h100": {"namespace": None, **flavor},
        "ClusterQueue vision-quota": {
            "namespace": None,
            "queueingStrategy": "StrictFIFO",
            "namespaceSelector": {"matchLabels": {"team": "vision"}},
            "cohortName": "research",
            "resourceGroups": kueue["clusterQueue"]["resourceGroups"],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        },
        "LocalQueue vision": {"namespace": helms.NAMESPACE, "clusterQueue": "vision-quota"},
    }
    assert {o["apiVersion"] for o in helms.objects(text) if checking.group(o) == "kueue.x-k8s.io"} == {
        "kueue.x-k8s.io/v1beta2"
    }


def test_the_queues_of_an_older_kueue(helm: helms.Helm) -> None:
    made = specs(helm.render(CHART, charts.load(charts.VALUES / "accel/nobody.yaml")), "kueue.x-k8s.io")
    queue = made["ClusterQueue team-accel"]
    assert queue["cohort"] == "research"
    assert queue["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": helms.NAMESPACE}}
    assert made["LocalQueue team-accel"]["clusterQueue"] == "team-accel"


def test_the_queue_of_volcano(helm: helms.Helm) -> None:
    made = specs(helm.render(CHART, EVERYTHING), "scheduling.volcano.sh")
    capability = {"cpu": 512, "memory": "4Ti"}
    assert made == {"Queue vision": {"namespace": None, "weight": 4, "reclaimable": False, "capability": capability}}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"kueue": {"clusterQueue": {"create": True}}}, "resourceGroups admits nothing"),
        ({"kueue": {"localQueue": {"create": True}}}, "name the ClusterQueue"),
        ({"kinds": dict.fromkeys(("pytorchjob", "jobset", "job", "trainjob"), False)}, "kinds: all are false"),
        ({"fullnameOverride": "Team_A"}, "fullnameOverride"),
        ({"rbac": {"subjects": [{"kind": "Robot", "name": "r"}]}}, "subjects"),
        ({"snapshots": {"size": "10 gigabytes"}}, "size"),
        ({"snapshots": {"accessModes": ["ReadWriteSometimes"]}}, "accessModes"),
        ({"cleanup": {"schedule": "at night"}}, "schedule"),
        ({"cleanup": {"afterHours": 0}}, "afterHours"),
        ({"tools": {"image": {"digest": "sha256:12"}}}, "digest"),
        ({"tools": {"runAsUser": 0}}, "runAsUser"),
        ({"kueue": {"apiVersion": "v1"}}, "apiVersion"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_meant_is_refused(helm: helms.Helm, values: helms.Values, line: str) -> None:
    with pytest.raises(helms.Refused, match=line):
        helm.render(CHART, values)


def test_the_network_policy(helm: helms.Helm) -> None:
    jobs = {"podSelector": {"matchExpressions": [{"key": "accel.dev/job-id", "operator": "Exists"}]}}
    policy = helms.named(helm.render(CHART, EVERYTHING), "NetworkPolicy")["spec"]
    assert policy["podSelector"] == jobs["podSelector"]
    assert policy["ingress"] == [{"from": [jobs]}, *EVERYTHING["networkPolicy"]["ingress"]]
    dns = {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]}
    assert policy["egress"] == [{"to": [jobs]}, dns, *EVERYTHING["networkPolicy"]["egress"]]
    least = helms.named(helm.render(CHART, charts.load(charts.VALUES / "accel/least.yaml")), "NetworkPolicy")["spec"]
    assert (least["ingress"], least["egress"]) == ([{"from": [jobs]}], [{}])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_notes_show_a_target_that_accel_reads(file: Path) -> None:
    helms.check_helm4()
    notes = helms.Helm4().notes(CHART, charts.load(file))
    block = notes[notes.index("  targets:") : notes.index("To test the permissions")]
    shown = yaml.safe_load(block)["targets"]["cluster"]
    assert shown.pop("kind") == "kubernetes"  # of the target; the kind of object is the target's default
    check(KubernetesOptions(**shown), "cluster")
    assert shown["namespace"] == helms.NAMESPACE
