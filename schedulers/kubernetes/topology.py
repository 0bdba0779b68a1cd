"""A pod's place in its job, from the environment variables that operators and the cluster set."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import SpecError
from ..topology import Topology, number


def from_operator(env: Mapping[str, str]) -> Topology:
    """Return the topology of a pod of a PyTorchJob (training operator v1) or a TrainJob (Trainer v2).

    Both set torchrun's variables. Raises SpecError, which names the variable, for invalid values, and for an
    elastic job, whose pods have no fixed ranks.
    """
    nodes = env.get("PET_NNODES", "1")
    if ":" in nodes or "PET_NODE_RANK" not in env:
        endpoint, _, port = env.get("PET_RDZV_ENDPOINT", "HOST:29500").rpartition(":")
        raise SpecError(
            f"the pod belongs to an elastic job (PET_NNODES={nodes}), whose pods have no fixed ranks: write "
            f"`accel launch --num_machines {nodes} --rdzv_backend c10d --main_process_ip {endpoint} "
            f"--main_process_port {port} …`"
        )
    count, rank = number(env, "PET_NNODES", default=1), number(env, "PET_NODE_RANK")
    if count == 1:
        return Topology(node_rank=rank, nodes=1, master="127.0.0.1", attempt=_attempt(env))
    # MASTER_ADDR may be anybody's: Trainer does not set it.
    master = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR", "")
    if not master:
        raise SpecError(f"the pod is one of {count} (PET_NNODES), but PET_MASTER_ADDR is not set")
    port_name = "PET_MASTER_PORT" if "PET_MASTER_PORT" in env else "MASTER_PORT"
    return Topology(
        node_rank=rank,
        nodes=count,
        master=master,
        attempt=_attempt(env),
        port=number(env, port_name) if port_name in env else None,
        source="the training operator",
    )


def from_index(env: Mapping[str, str]) -> Topology | None:
    """Return the topology of a pod of an Indexed Job or a JobSet. Its index is its node's rank.

    With several Jobs (TPU slices), the index is the rank within the pod's Job. The cluster does not set the
    number of pods. Without ACCEL_NODES each pod runs alone, as in most Indexed Jobs; but a pod of a TPU slice,
    which has TPU_WORKER_HOSTNAMES, gets None. Raises SpecError, which names the variable, for invalid values.
    """
    if "ACCEL_NODES" not in env and "TPU_WORKER_HOSTNAMES" in env:
        return None
    nodes = number(env, "ACCEL_NODES", default=1)
    if nodes == 1:
        return Topology(node_rank=0, nodes=1, master="127.0.0.1", attempt=_attempt(env))
    if not env.get("ACCEL_MASTER"):
        raise SpecError(f"the pod is one of {nodes} (ACCEL_NODES), but ACCEL_MASTER is not set")
    slices = number(env, "MEGASCALE_NUM_SLICES", default=1)
    rank_offset = number(env, "MEGASCALE_SLICE_ID") * (nodes // slices) if slices > 1 else 0
    return Topology(
        node_rank=rank_offset + number(env, "JOB_COMPLETION_INDEX"),
        nodes=nodes,
        master=env["ACCEL_MASTER"],
        attempt=_attempt(env),
        port=number(env, "ACCEL_PORT") if "ACCEL_PORT" in env else None,
        source="the manifest of the job",
    )


def _attempt(env: Mapping[str, str]) -> int:
    # Empty if no JobSet created the pod.
    return number(env, "JOBSET_RESTART_ATTEMPT") if env.get("JOBSET_RESTART_ATTEMPT") else 0
