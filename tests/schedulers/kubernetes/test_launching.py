"""What the pods run, read by `accel launch` itself beside the variables that an operator gives each of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from accel.launch.flags import add_arguments
from accel.launch.plan import Launch, plan
from accel.launch.worker import Program
from schedulers import JobSpec, Retry
from schedulers.kubernetes.manifests import build, validate
from schedulers.kubernetes.manifests.code_delivery import Code
from tests.schedulers.kubernetes.support import JOB_ID, KINDS, least

_SPEC = JobSpec(argv=("train.py", "--lr", "0.1"), name="train", nodes=2, procs_per_node=2, grace_s=7)
_NAME = "train-2mxaaaaaaaa"
# What is added to a container's own variables on the second node: by the operators, or by the cluster.
_ADDED = {
    "pytorchjob": {
        "MASTER_ADDR": f"{_NAME}-worker-0", "PET_RDZV_ENDPOINT": f"{_NAME}-worker-0:29500", "PET_NNODES": "2:2",
        "PET_RDZV_BACKEND": "c10d", "PET_NPROC_PER_NODE": "2", "WORLD_SIZE": "4", "ACCEL_NODE_RANK": "1",
    },
    "trainjob": {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": f"{_NAME}-node-0-0.{_NAME}", "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "1",
    },
    "jobset": {"JOB_COMPLETION_INDEX": "1"},
    "job": {"JOB_COMPLETION_INDEX": "1"},
}  # fmt: skip
_MASTER = {
    "pytorchjob": f"{_NAME}-worker-0",
    "trainjob": f"{_NAME}-node-0-0.{_NAME}",
    "jobset": f"{_NAME}-node-0-0.{_NAME}",
    "job": f"{_NAME}-0.{_NAME}",
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def launched(spec: JobSpec, kind: str, added: dict[str, str]) -> Launch:
    made = build.build(spec, least(workload=kind), JOB_ID, Code(kind="configmap"))
    template = [found for each in made for _, found in validate.templates(each)][-1]
    container = template["spec"]["containers"][0]
    env = {each["name"]: each.get("value", "0") for each in container["env"]} | added
    words = container["command"]
    assert words[:2] == ["accel", "launch"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options: dict[str, Any] = vars(parser.parse_args(words[2 : words.index("--")]))
    return plan(options, Program(argv=words[words.index("--") + 1 :], entry="script"), env)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_finds_its_place(kind: str) -> None:
    run = launched(_SPEC, kind, _ADDED[kind])
    assert (run.node_rank, run.nodes, run.max_nodes, run.processes) == (1, 2, 2, 2)
    assert (run.address, run.port) == (_MASTER[kind], 29500)
    assert (run.grace_s, run.run_id, run.tee, run.first_attempt) == (7, JOB_ID, "3", 0)
    assert run.rdzv_conf == {"timeout": "1800"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_pod_is_alone(kind: str) -> None:
    alone = JobSpec(argv=("train.py",), name="train")
    added = {**_ADDED[kind], "PET_NNODES": "1", "PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}
    if kind in ("job", "jobset"):
        added = {"JOB_COMPLETION_INDEX": "0"}
    added.pop("ACCEL_NODE_RANK", None)  # a single master has none
    assert launched(alone, kind, added).is_single_process


def test_a_pod_of_a_world_that_may_grow() -> None:
    spec = JobSpec(
        argv=("train.py",), name="train", nodes=2, max_nodes=8, procs_per_node=4, retry=Retry(max_restarts=3)
    )
    added = {
        "PET_RDZV_ENDPOINT": f"{_NAME}-worker-0:29500", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:8",
        "PET_NPROC_PER_NODE": "4", "PET_RDZV_ID": JOB_ID, "PET_MAX_RESTARTS": "3",
    }  # fmt: skip
    run = launched(spec, "pytorchjob", added)
    assert (run.nodes, run.max_nodes, run.processes, run.max_restarts) == (2, 8, 4, 3)
    assert (run.rdzv_backend, run.address, run.port, run.run_id) == ("c10d", f"{_NAME}-worker-0", 29500, JOB_ID)
