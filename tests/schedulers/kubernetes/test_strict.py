"""Every manifest of every kind, for each option, is what its API knows, and nothing else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from schedulers import JobSpec, Resources, Retry
from schedulers.kubernetes.manifests import build
from schedulers.kubernetes.manifests import code_delivery as delivery
from schedulers.kubernetes.options import KubernetesOptions
from tests.needs import package
from tests.schedulers.kubernetes import strict
from tests.schedulers.kubernetes.support import CASES, JOB_ID, KINDS, allowed, everything, everything_spec, least

_DATA = b"\x1f\x8b" + bytes(range(256)) * 8

SPECS = {
    "one node": JobSpec(argv=("train.py",)),
    "two nodes": JobSpec(
        argv=("train.py",),
        nodes=2,
        resources=Resources(gpus=2, cpus=4, memory_gb=10),
        secrets={"TOKEN": "secret:keys/token"},
        time_limit_s=60.5,
        retry=Retry(max_restarts=2),
    ),
}


def objects(spec: JobSpec, given: KubernetesOptions) -> list[dict[str, Any]]:
    code = delivery.choose_delivery(given, len(_DATA), delivery.digest_of(_DATA), "k")
    return list(build.build(spec, given, JOB_ID, code, data=_DATA))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_one_option(kind: str, case: str) -> None:
    if not allowed(kind, case):
        return
    if "patch" in case:
        package("kubernetes")
    given = least(workload=kind, **CASES[case])
    for spec in SPECS.values():
        if given.cpu:
            spec = dataclasses.replace(spec, resources=Resources())
        for made in objects(spec, given):
            assert strict.errors(made) == []
            assert strict.errors(build.with_digest(made, spec)) == []
            uid = {"apiVersion": "v1", "kind": "Job", "metadata": {"name": "a", "uid": "u"}}
            assert strict.errors(build.with_owner(made, uid)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_all_options_at_once(kind: str) -> None:
    for made in objects(everything_spec(), everything(kind)):
        assert strict.errors(made) == []


def test_a_world_that_may_grow() -> None:
    for given in (least(), everything("pytorchjob")):
        for made in objects(everything_spec(nodes=2, max_nodes=8), given):
            assert strict.errors(made) == []


@pytest.mark.parametrize("version", strict.VERSIONS)
def test_jobs_and_services_are_known_to_every_version(version: str) -> None:
    restarts = Retry(max_restarts=1 if float(version) >= 1.28 else 0)  # a limit for each index is of Kubernetes 1.28
    for given, spec in ((least(workload="job"), SPECS["two nodes"]), (everything("job"), everything_spec())):
        for made in objects(dataclasses.replace(spec, retry=restarts), given):
            assert strict.errors(made, version) == []


def test_the_loader_of_a_claim() -> None:
    place = {"code": "pvc", "code_claim": "snapshots"}
    assert strict.errors(build.loader_pod(SPECS["one node"], least(**place), JOB_ID, "k")) == []
    assert strict.errors(build.loader_pod(everything_spec(), everything("job", **place), JOB_ID, "k")) == []


def test_the_check_is_strict() -> None:
    made = objects(SPECS["one node"], least())[0]
    made["spec"]["typo"] = 1
    made["spec"]["nprocPerNode"] = 2
    assert len(strict.errors(made)) == 2
    job = objects(SPECS["one node"], least(workload="job"))[0]
    job["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    assert strict.errors(job) != []


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_the_check_of_the_models_is_strict(kind: str) -> None:
    made = objects(SPECS["one node"], least(workload=kind))[0]
    made["spec"]["typo"] = 1
    assert strict.errors(made) == ["not kept: .spec.typo"]
