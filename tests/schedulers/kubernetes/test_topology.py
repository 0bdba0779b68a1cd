"""Where a pod stands, by the variables that each kind of object gives its containers."""

from __future__ import annotations

import pytest

from schedulers import SpecError, Topology

# As the training operator 1.9 sets them on the second pod of two with two processes each.
_PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1", "MASTER_PORT": "29500", "PET_MASTER_PORT": "29500", "MASTER_ADDR": "run1-master-0",
    "PET_MASTER_ADDR": "run1-master-0", "WORLD_SIZE": "4", "RANK": "1", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2",
    "PET_NNODES": "2",
}  # fmt: skip
_ELASTIC = {
    "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "run1-worker-0:29500", "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:8",
}  # fmt: skip
# As Trainer 2.3 does, whose pods belong to a JobSet.
_TRAINJOB = {
    "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "run1-node-0-0.run1",
    "PET_MASTER_PORT": "29500", "JOB_COMPLETION_INDEX": "3", "JOBSET_RESTART_ATTEMPT": "2",
}  # fmt: skip
_JOB = {"JOB_COMPLETION_INDEX": "1", "ACCEL_NODES": "2", "ACCEL_MASTER": "run1-0.run1", "ACCEL_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (_PYTORCHJOB, (1, 2, "run1-master-0", 29500, 0)),
        ({**_PYTORCHJOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"}, (0, 1, "127.0.0.1", None, 0)),
        (_TRAINJOB, (3, 4, "run1-node-0-0.run1", 29500, 2)),
        (_JOB, (1, 2, "run1-0.run1", 29500, 0)),
        ({**_JOB, "JOBSET_RESTART_ATTEMPT": "1"}, (1, 2, "run1-0.run1", 29500, 1)),
        ({**_JOB, "JOBSET_RESTART_ATTEMPT": ""}, (1, 2, "run1-0.run1", 29500, 0)),
        ({**_JOB, "ACCEL_NODES": "1"}, (0, 1, "127.0.0.1", None, 0)),
        ({**_JOB, "ACCEL_NODES": "6", "MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2"},
         (5, 6, "run1-0.run1", 29500, 0)),
        # An Indexed Job of somebody's whose pods have nothing to do with each other.
        ({"JOB_COMPLETION_INDEX": "7"}, (0, 1, "127.0.0.1", None, 0)),
    ],
)  # fmt: skip
def test_rules(env: dict[str, str], expected: tuple[int, int, str, int | None, int]) -> None:
    found = Topology.from_env(env)
    assert (found.node_rank, found.nodes, found.master, found.port, found.attempt) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (_ELASTIC, "--num_machines 2:8 --rdzv_backend c10d --main_process_ip run1-worker-0 --main_process_port 29500"),
        ({**_PYTORCHJOB, "PET_NODE_RANK": "x"}, "PET_NODE_RANK must be a whole number, not 'x'"),
        ({**_PYTORCHJOB, "PET_NODE_RANK": "2"}, "node rank 2 is not one of 0 … 1"),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2"}, "the pod is one of 2 (PET_NNODES), but PET_MASTER_ADDR is not set"),
        ({**_JOB, "ACCEL_MASTER": ""}, "the pod is one of 2 (ACCEL_NODES), but ACCEL_MASTER is not set"),
        ({**_JOB, "JOB_COMPLETION_INDEX": "2"}, "node rank 2 is not one of 0 … 1"),
    ],
)  # fmt: skip
def test_a_wrong_world_is_not_guessed(env: dict[str, str], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Topology.from_env(env)
    assert message in str(caught.value)
