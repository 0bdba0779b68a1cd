"""Where a container of SageMaker and a host of a TPU slice stand, and which rule decides where several could."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schedulers import SpecError, Topology

HOSTS = [f"algo-{number}" for number in range(1, 13)]
TOOLKIT = {"SM_HOSTS": json.dumps(sorted(HOSTS)), "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "run"}
WORKER = {
    "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0,t1,t2,t3", "TPU_ACCELERATOR_TYPE": "v5litepod-16",
}  # fmt: skip
SLICES = {
    **WORKER, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "run-slice-0-0.run:8080",
}  # fmt: skip
INDEXED = {"JOB_COMPLETION_INDEX": "3", "ACCEL_NODES": "4", "ACCEL_MASTER": "run-0.run"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TOOLKIT, (1, 12, "algo-1", "SageMaker")),
        ({**TOOLKIT, "SM_CURRENT_HOST": "algo-10"}, (9, 12, "algo-1", "SageMaker")),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, (0, 1, "127.0.0.1", "")),
        ({"SM_HOSTS": '["b-2", "a-10", "a-9"]', "SM_CURRENT_HOST": "a-10"}, (1, 3, "a-9", "SageMaker")),
        (WORKER, (1, 4, "t0", "TPU_WORKER_HOSTNAMES of the v5litepod-16")),
        ({"TPU_WORKER_HOSTNAMES": "a, b", "CLOUD_TPU_TASK_ID": "1"}, (1, 2, "a", "TPU_WORKER_HOSTNAMES")),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, (0, 1, "127.0.0.1", "")),
        (SLICES, (5, 8, "run-slice-0-0.run", "MEGASCALE_NUM_SLICES and TPU_WORKER_HOSTNAMES of the v5litepod-16")),
        ({**SLICES, "TPU_WORKER_HOSTNAMES": "t0", "TPU_WORKER_ID": "0"},
         (1, 2, "run-slice-0-0.run", "MEGASCALE_NUM_SLICES and TPU_WORKER_HOSTNAMES of the v5litepod-16")),
        # A pod of a slice: what the manifest says goes before what the cluster adds.
        ({**WORKER, **INDEXED}, (3, 4, "run-0.run", "the manifest of the job")),
        ({**WORKER, "JOB_COMPLETION_INDEX": "1"}, (1, 4, "t0", "TPU_WORKER_HOSTNAMES of the v5litepod-16")),
        # A name that is only called so.
        ({**WORKER, "TRAINING_JOB_NAME": "mine", "ACCEL_SM_ROOT": "/nowhere"},
         (1, 4, "t0", "TPU_WORKER_HOSTNAMES of the v5litepod-16")),
        ({"ACCEL_NODE_RANK": "1", "ACCEL_NODES": "2", "ACCEL_MASTER": "h"},
         (1, 2, "h", "the job's environment (ACCEL_NODES)")),
    ],
)  # fmt: skip
def test_rules(env: dict[str, str], expected: tuple[int, int, str, str]) -> None:
    found = Topology.from_env(env)
    assert (found.node_rank, found.nodes, found.master, found.source) == expected


def test_a_container_without_the_toolkit(tmp_path: Path) -> None:
    env = {"TRAINING_JOB_NAME": "run", "ACCEL_SM_ROOT": str(tmp_path)}
    assert Topology.from_scheduler(env) is None
    file = tmp_path / "input/config/resourceconfig.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"current_host": "algo-11", "hosts": HOSTS[::-1], "network_interface_name": "eth0"}))
    found = Topology.from_env(env)
    assert (found.node_rank, found.nodes, found.master, found.names) == (10, 12, "algo-1", tuple(HOSTS))
    file.write_text('{"hosts": ["algo-1"]}')
    with pytest.raises(SpecError, match=r"resourceconfig\.json: this host, None, is not one of algo-1"):
        Topology.from_env(env)
    file.write_text("[")
    with pytest.raises(SpecError, match=r"resourceconfig\.json cannot be read: "):
        Topology.from_env(env)


def test_nobody_has_placed_this_process() -> None:
    assert Topology.from_scheduler({"PATH": "/bin"}) is None
    assert Topology.from_env({"PATH": "/bin"}).nodes == 1


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({**TOOLKIT, "SM_CURRENT_HOST": "algo-13"}, "SM_HOSTS: this host, 'algo-13', is not one of algo-1, algo-2"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "SM_HOSTS: this host, None, is not one of"),
        ({"SM_HOSTS": "algo-1,algo-2"}, "SM_HOSTS: the hosts must be a list of names in JSON, not 'algo-1,algo-2'"),
        ({"SM_HOSTS": "{}"}, "SM_HOSTS: the hosts must be a list of names in JSON, not {}"),
        ({"SM_HOSTS": "[1]"}, "SM_HOSTS: the hosts must be a list of names in JSON, not [1]"),
        ({**WORKER, "TPU_WORKER_ID": "4"}, "TPU_WORKER_ID=4, and TPU_WORKER_HOSTNAMES has 4 names"),
        ({**WORKER, "TPU_WORKER_ID": "one"}, "TPU_WORKER_ID must be a whole number, not 'one'"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "one of several nodes, but TPU_WORKER_ID is not set"),
        ({**SLICES, "MEGASCALE_SLICE_ID": "2"}, "node rank 9 is not one of 0 … 7"),
        ({**SLICES, "MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR_ADDRESS is not set"),
    ],
)  # fmt: skip
def test_a_wrong_world_is_not_guessed(env: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Topology.from_env(env)
    assert message in str(caught.value)
