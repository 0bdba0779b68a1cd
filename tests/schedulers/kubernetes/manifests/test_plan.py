"""What a submit will do, told without a cluster."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from schedulers import JobSpec, Plan
from schedulers.kubernetes.manifests import build
from tests.golden import assert_golden
from tests.schedulers.kubernetes.support import JOB_ID, KINDS, everything, everything_spec, least

_STORE = {"url": "s3://bucket/code", "image": "aws"}


def test_the_dry_run() -> None:
    spec = JobSpec(argv=("train.py", "--lr", "0.1"), name="train", code="/home/me/project")
    assert_golden("kubernetes/plan.txt", str(build.plan(spec, least(workload="job"), JOB_ID, "k")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_is_data_and_its_files_are_the_objects(kind: str) -> None:
    plan = build.plan(everything_spec(), everything(kind), JOB_ID, "k")
    assert Plan.from_json(plan.to_json()) == plan
    kinds = [yaml.safe_load(text)["kind"].lower() for text in plan.files.values()]
    assert [action[1].partition("/")[0] for action in plan.actions if action[0] == "create"] == [*kinds, "configmap"]
    assert plan.actions[-1][-len(everything_spec().argv) :] == everything_spec().argv


@pytest.mark.parametrize(
    ("given", "action"),
    [
        ({}, ("create", "configmap/train-2mxaaaaaaaa-code-0", "out of", ".")),
        (
            {"code_claim": "c"},
            (
                "create",
                "configmap/train-2mxaaaaaaaa-code-0",
                "out of",
                ".",
                "or, if it is more than 1 MiB, to",
                "claim c",
            ),
        ),
        (
            {"code": "pvc", "code_claim": "c"},
            ("send", ".", "to", "claim c", "through pod/train-2mxaaaaaaaa-loader", "where it is lacking"),
        ),
        ({"code": "store", "code_store": _STORE}, ("send", ".", "to", "s3://bucket/code", "where it is lacking")),
    ],
)
def test_where_the_code_goes(given: dict[str, Any], action: tuple[str, ...]) -> None:
    assert action in build.plan(JobSpec(argv=("a.py",), name="train"), least(**given), JOB_ID, "k").actions


def test_an_elastic_plan_shows_what_the_pods_run() -> None:
    plan = build.plan(JobSpec(argv=("a.py",), nodes=2, max_nodes=8), least(), JOB_ID, "k")
    assert plan.actions[-1][:6] == ("accel", "launch", "--num_processes", "2", "--num_machines", "2:8")
