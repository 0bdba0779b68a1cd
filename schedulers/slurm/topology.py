"""A node's place in a Slurm step, from srun's variables. For batch scripts written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import SpecError
from ..topology import Topology, number

# The same formula as in slurm/batch/slurm.py, which also checks that the port is free.
FIRST_PORT, PORTS = 20000, 12000
_PORTS_BETWEEN_STEPS = 101
# Ids of steps that srun did not create: batch scripts, interactive shells, processes outside any step
# (slurm.h: SLURM_BATCH_SCRIPT and its neighbours; before 20.11 the two highest numbers).
_SPECIAL_STEPS = 0xFFFF_FFF0
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?\Z")


def from_slurm(env: Mapping[str, str]) -> Topology:
    """Return the topology of this process's step; one node outside any step of a one-node job.

    Every node must have one task, which starts the ranks there. Raises SpecError, which names the variable, if it
    has more, if the job has several nodes and this is no step, and for invalid values.
    """
    job, step = number(env, "SLURM_JOB_ID"), _step(env)
    if step is None:
        return _outside(env, job)
    nodes = number(env, "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES")
    if nodes == 1 and "SLURM_PTY_PORT" in env:
        # A shell for a person. `srun --ntasks-per-node=4 --pty bash` is how people ask for four cores.
        return Topology(node_rank=0, nodes=1, master="127.0.0.1", attempt=_attempt(env))
    _check_one_task_a_node(env, nodes)
    if nodes == 1:
        return Topology(node_rank=0, nodes=1, master="127.0.0.1", attempt=_attempt(env))
    names = _names(env, nodes)
    node_name = env.get("SLURMD_NODENAME")
    # If the step has a part of the job's nodes, the position in its list counts: node 0 must be the first name.
    rank = names.index(node_name) if node_name in names else number(env, "SLURM_NODEID")
    return Topology(
        node_rank=rank,
        nodes=nodes,
        master=names[0],
        attempt=_attempt(env),
        port=port_of(job, step),
        names=tuple(names),
        source=f"step {step} of Slurm job {job}",
    )


def port_of(job: int, step: int) -> int:
    """Return a port of node 0 that steps of different jobs on one node rarely share."""
    return FIRST_PORT + (job + step * _PORTS_BETWEEN_STEPS) % PORTS


def _step(env: Mapping[str, str]) -> int | None:
    if "SLURM_STEP_ID" not in env:
        return None
    step = number(env, "SLURM_STEP_ID")
    return None if step >= _SPECIAL_STEPS else step


def _outside(env: Mapping[str, str], job: int) -> Topology:
    nodes = number(env, "SLURM_JOB_NUM_NODES", default=number(env, "SLURM_NNODES", default=1))
    if nodes > 1:
        raise SpecError(
            f"Slurm job {job} has {nodes} nodes (SLURM_JOB_NUM_NODES), and this process is in no step: write "
            "`srun --ntasks-per-node=1 accel launch …` to use them all, or --num_machines 1 for this node alone"
        )
    return Topology(node_rank=0, nodes=1, master="127.0.0.1", attempt=_attempt(env))


def _check_one_task_a_node(env: Mapping[str, str], nodes: int) -> None:
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if text is None:
        tasks = number(env, "SLURM_STEP_NUM_TASKS", default=number(env, "SLURM_NTASKS", default=nodes))
        peak, setting = -(-tasks // nodes), f"SLURM_STEP_NUM_TASKS={tasks} on {nodes} nodes"
    else:
        matches = [_TASKS.match(part) for part in text.split(",")]
        counts = [int(match[1]) for match in matches if match is not None]
        if len(counts) != len(matches):
            raise SpecError(f"environment: SLURM_STEP_TASKS_PER_NODE must be like 1(x2), not {text!r}")
        peak, setting = max(counts), f"SLURM_STEP_TASKS_PER_NODE={text}"
    if peak > 1:
        raise SpecError(
            f"{setting}: accel launch starts all ranks of a node and must itself be started once per node: write "
            f"`srun --ntasks-per-node=1 accel launch --num_processes {peak * nodes} …` (and --cpus-per-task for cores)"
        )


def _names(env: Mapping[str, str], nodes: int) -> list[str]:
    from .nodelist import expand

    text = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    if not text:
        raise SpecError(f"Slurm says that this step has {nodes} nodes, but SLURM_STEP_NODELIST is not set")
    names = expand(text)
    if len(names) != nodes:
        raise SpecError(f"SLURM_STEP_NODELIST={text} names {len(names)} nodes, and SLURM_STEP_NUM_NODES is {nodes}")
    return names


def _attempt(env: Mapping[str, str]) -> int:
    return number(env, "SLURM_RESTART_COUNT", default=0)
